"""AdamW with a state of 32 or 8 bits, and that state as plain tensors (no pickle).

The 8-bit one is bitsandbytes' (arXiv 2110.02861): each moment is one byte a parameter and a float32 scale for every 256
of them. Tensors of fewer than 4096 elements keep float32 moments. The update itself is computed in float32 either way.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import torch

from podium.errors import CheckpointError, InputError

Parameters = Mapping[str, torch.nn.Parameter]
OptimizerName = Literal["adamw", "adamw_8bit"]

BLOCK, MIN_8BIT_SIZE = 256, 4096
"""bitsandbytes' own: elements that share a scale, and elements below which a tensor keeps float32 moments."""
REMEDY = 'set trainer.optimizer = "adamw"'


def make_optimizer(
    parameters: Parameters, name: OptimizerName, *, lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.Optimizer:
    """One group, in the order of the names."""
    if name == "adamw":
        return torch.optim.AdamW(parameters.values(), lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
    if all(parameter.numel() < MIN_8BIT_SIZE for parameter in parameters.values()):
        raise InputError(
            f"trainer.optimizer = {name!r} has no effect: every trained tensor has fewer than {MIN_8BIT_SIZE} elements "
            f"and keeps a state of 32 bits; {REMEDY}"
        )
    from bitsandbytes.optim.adamw import AdamW8bit  # type: ignore[import-not-found]  # an extra

    options = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "min_8bit_size": MIN_8BIT_SIZE}
    return AdamW8bit(parameters.values(), **options)


def check_optimizer(name: OptimizerName, device: torch.device) -> None:
    """Raises `InputError` unless the optimizer can make a step on this device: it is tried on a few numbers."""
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
    except Exception as error:  # whatever a build for another machine raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"trainer.optimizer = {name!r}: this bitsandbytes cannot run on {device}: {reason}; try a newer one, "
            f"or {REMEDY}"
        ) from None


def state_bytes(name: OptimizerName, parameters: Iterable[torch.Tensor]) -> int:
    """What the two moments of each parameter take."""
    return sum(
        2 * (p.numel() + 4 * -(-p.numel() // BLOCK))
        if name == "adamw_8bit" and p.numel() >= MIN_8BIT_SIZE
        else 2 * p.numel() * p.element_size()
        for p in parameters
    )


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Parameters) -> Iterator[tuple[str, torch.Tensor]]:
    """`optimizer.<parameter>.<slot>` → tensor; a count that the optimizer keeps as an int becomes an int64 one."""
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
    """The inverse; a parameter without saved slots has not been updated yet.

    `part_for(parameter, whole)` is what this rank keeps of a tensor of the parameter's shape.
    """
    first_moment = "exp_avg" if isinstance(optimizer, torch.optim.AdamW) else "state1"
    for name, parameter in parameters.items():
        prefix = f"optimizer.{name}."
        slots = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if slots and first_moment not in slots:
            raise CheckpointError("the checkpoint holds another optimizer's state; set trainer.optimizer as it was")
        optimizer.state.pop(parameter, None)  # of an optimizer that has stepped; the saved one may not have
        if slots:
            optimizer.state[parameter] = {
                slot: int(value)
                if value.dtype == torch.int64
                else part_for(parameter, value.clone())
                if value.shape == parameter.shape
                else value.clone().to(parameter.device)
                for slot, value in sorted(slots.items())  # the same order on every rank
            }
