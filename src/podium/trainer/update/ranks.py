"""Communication between the ranks of an optimizer step; with one process, nothing is sent.

A batch's loss is its share of the whole step, so gradients and sums of metrics add up over ranks, and every rank makes
the same update. All ranks must make the same calls in the same order. So a rank reports an error inside a pass to the
others, which stop with a `RankError`. If the pass itself communicates (it gathers weights or reduces gradients), the
others are waiting inside it and would mistake the report for their answer; the error is then raised directly and ends
the process. When a process dies, gloo raises a RuntimeError at once; with NCCL, or if a process hangs, the others wait
until torchrun kills them or the timeout of `init_process_group` has passed.
"""

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import TypeVar

import torch
import torch.distributed as dist

from podium.errors import RankError

T = TypeVar("T")

ANOTHER_FAILED = "another rank failed in this step, so this rank cannot continue; the other rank's message says why"


class Outcome(IntEnum):
    """How a rank's pass over its batches ended. The worst outcome of any rank counts for all."""

    DONE = 0
    TOO_LARGE = 1
    """Out of memory; smaller batches may fit."""
    FAILED = 2


def has_several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def worst_over_ranks(outcome: Outcome, device: torch.device) -> Outcome:
    if not has_several_ranks():
        return outcome
    worst = torch.tensor(int(outcome), device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return Outcome(int(worst))


def together(function: Callable[[], T], device: torch.device, *, asks_others: bool = False) -> T:
    """Calls the function on every rank and returns its result; an error on one rank stops all.

    `asks_others`: the function itself communicates with other ranks, so its error cannot be reported to them and ends
    this process.
    """
    if asks_others:
        return function()
    try:
        result = function()
    except Exception:
        worst_over_ranks(Outcome.FAILED, device)
        raise
    if worst_over_ranks(Outcome.DONE, device) is Outcome.FAILED:
        raise RankError(ANOTHER_FAILED)
    return result


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The elementwise sum over all ranks."""
    if not has_several_ranks():
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Sums in float32 or wider. A rank without a gradient counts as zeros; if no rank has one, there is still none."""
    if not has_several_ranks():
        return
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    present = torch.tensor([float(parameter.grad is not None) for parameter in trained], device=trained[0].device)
    for parameter, count in zip(trained, sum_over_ranks(present).tolist(), strict=True):
        if count:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            total = own.to(torch.promote_types(own.dtype, torch.float32)).contiguous()
            dist.all_reduce(total)
            parameter.grad = total.to(own.dtype)
