"""What the ranks of an optimizer step tell each other; a run of one process tells nobody anything.

Each rank holds all parameters and a part of the step's batches. A batch's loss is its share of the whole step, so
gradients and sums of metrics simply add up. Every rank ends with the same bits and makes the same update.

The ranks must ask the same things in the same order. So an error inside a pass is told to the others, which then stop
with a `RankError`. That works only where a pass itself asks the others nothing. Where it does (weights are gathered,
gradients are reduced on the way), the others wait inside the pass for the rank that failed, and would take an answer to
another question for what they wait for. Then the error is raised as it is and ends the rank's process.

A process that dies tells nothing: gloo sees its connection close and raises a RuntimeError at once; with NCCL, or where
a process only hangs, the others wait until torchrun kills them or the timeout given to `init_process_group` has passed.
"""

from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import TypeVar

import torch
import torch.distributed as dist

from podium.errors import RankError

T = TypeVar("T")

ANOTHER_FAILED = "another rank failed in this step, so none can go on; its own message says why"


class Outcome(IntEnum):
    """How a rank's pass over its batches ended. The worst counts for all."""

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
    """Its result; an error on one rank stops all.

    `asks_others`: the function meets the other ranks itself, so its error cannot be told to them and ends this process.
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
    """Element by element."""
    if not has_several_ranks():
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """In float32 or wider. A rank without a gradient counts as zeros; where none has one, there is still none."""
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
