"""AdamW, and its state as plain tensors (no pickle)."""

from collections.abc import Iterator, Mapping

import torch

Parameters = Mapping[str, torch.nn.Parameter]


def make_optimizer(parameters: Parameters, *, lr: float, betas: tuple[float, float], weight_decay: float):
    """One group, in the order of the names."""
    return torch.optim.AdamW(parameters.values(), lr=lr, betas=betas, weight_decay=weight_decay, fused=True)


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Parameters) -> Iterator[tuple[str, torch.Tensor]]:
    """`optimizer.<parameter>.<slot>` → tensor."""
    for name, parameter in parameters.items():
        for slot, value in optimizer.state.get(parameter, {}).items():
            yield f"optimizer.{name}.{slot}", value


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Parameters, tensors: Mapping[str, torch.Tensor]
) -> None:
    """The inverse; a parameter without saved slots has not been updated yet."""
    for name, parameter in parameters.items():
        prefix = f"optimizer.{name}."
        slots = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if slots:
            optimizer.state[parameter] = {slot: value.clone().to(parameter.device) for slot, value in slots.items()}
