"""AdamW with 32-bit or 8-bit state, that state as plain tensors (no pickle), and the learning-rate schedule.

The 8-bit optimizer is bitsandbytes' (arXiv 2110.02861): each moment is one byte per parameter plus a float32 scale per
256 parameters. Tensors of fewer than 4096 elements keep float32 moments. The update is computed in float32 either way.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import torch

from podium.errors import CheckpointError, InputError, first_line

Parameters = Mapping[str, torch.nn.Parameter]
OptimizerName = Literal["adamw", "adamw_8bit"]

BLOCK, MIN_8BIT_SIZE = 256, 4096
"""bitsandbytes' own limits: elements that share a scale; smaller tensors keep float32 moments."""
REMEDY = 'set trainer.optimizer = "adamw"'


def make_optimizer(
    parameters: Parameters, name: OptimizerName, *, lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.Optimizer:
    """One parameter group, in the order of the names."""
    if name == "adamw":
        return torch.optim.AdamW(parameters.values(), lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
    if all(parameter.numel() < MIN_8BIT_SIZE for parameter in parameters.values()):
        raise InputError(
            f"trainer.optimizer = {name!r} has no effect: every trained tensor has fewer than {MIN_8BIT_SIZE} elements "
            f"and keeps a 32-bit state; {REMEDY}"
        )
    from bitsandbytes.optim.adamw import AdamW8bit  # type: ignore[import-not-found]  # an extra

    options = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "min_8bit_size": MIN_8BIT_SIZE}
    return AdamW8bit(parameters.values(), **options)


def check_optimizer(name: OptimizerName, device: torch.device) -> None:
    """Raises `InputError` unless the optimizer can make a step on this device; tries one on a few numbers."""
    if name != "adamw_8bit":
        return
    probe = torch.nn.Parameter(torch.ones(MIN_8BIT_SIZE, device=device))
    probe.grad = torch.ones_like(probe)
    try:
        make_optimizer({"probe": probe}, name, lr=0.1, betas=(0.9, 0.999), weight_decay=0.0).step()
    except ImportError:
        raise InputError(
            f"trainer.optimizer = {name!r} needs a package: pip install 'bitsandbytes>=0.50'; or {REMEDY}"
        ) from None
    except Exception as error:  # a build for another machine raises anything
        raise InputError(
            f"trainer.optimizer = {name!r}: this bitsandbytes cannot run on {device}: {first_line(error)}; try a newer "
            f"one, or {REMEDY}"
        ) from None


def state_bytes(name: OptimizerName, parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of the two moments of all parameters."""
    return sum(
        2 * (p.numel() + 4 * -(-p.numel() // BLOCK))
        if name == "adamw_8bit" and p.numel() >= MIN_8BIT_SIZE
        else 2 * p.numel() * p.element_size()
        for p in parameters
    )


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Parameters) -> Iterator[tuple[str, torch.Tensor]]:
    """`optimizer.<parameter>.<slot>` → tensor; a count that the optimizer keeps as an int becomes an int64 tensor."""
    for name, parameter in parameters.items():
        for slot, value in optimizer.state.get(parameter, {}).items():
            yield f"optimizer.{name}.{slot}", torch.as_tensor(value)


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    parameters: Parameters,
    tensors: Mapping[str, torch.Tensor],
    part_for: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda parameter, whole: whole.to(
        parameter.device
    ),
) -> None:
    """The inverse of `optimizer_state`; a parameter without saved slots has not been updated yet.

    `part_for(parameter, whole)` returns the part of a tensor of the parameter's shape that this rank keeps.
    """
    first_moment = "exp_avg" if isinstance(optimizer, torch.optim.AdamW) else "state1"
    for name, parameter in parameters.items():
        prefix = f"optimizer.{name}."
        slots = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if slots and first_moment not in slots:
            raise CheckpointError("the checkpoint holds another optimizer's state; set trainer.optimizer as it was")
        optimizer.state.pop(parameter, None)  # this optimizer may have stepped when the saved one had not
        if slots:
            optimizer.state[parameter] = {
                slot: int(value)
                if value.dtype == torch.int64
                else part_for(parameter, value.clone())
                if value.shape == parameter.shape
                else value.clone().to(parameter.device)
                for slot, value in sorted(slots.items())  # the same order on every rank
            }


Schedule = Literal["constant", "linear", "cosine"]


def rate_at(lr: float, step: int, *, warmup_steps: int, total_steps: int, schedule: Schedule) -> float:
    """Learning rate of a step, counted from 0: a linear warm-up, then constant, or a linear or cosine decay to zero at
    the run's last step."""
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    left = max(0.0, 1 - done)
    return lr * (left if schedule == "linear" else (1 + math.cos(math.pi * (1 - left))) / 2)
