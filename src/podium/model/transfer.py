"""Records to a device: one transfer for all their tensors of a kind, since each by itself costs more than its bytes."""

import dataclasses
from typing import Any, TypeVar

import torch

R = TypeVar("R")

ALIGNMENT = 16
"""Elements: every tensor begins where a kernel may load whole words."""


def to_device(record: R, device: torch.device) -> R:
    """The same dataclass with its tensors on `device`, those of dataclasses inside it too.

    A batch's `cu_seqlens` stays where it is: documents are counted and cut on the CPU.
    """
    if device.type == "cpu":
        return record
    tensors: dict[int, torch.Tensor] = {}
    _collect(record, tensors)
    moved: dict[int, torch.Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors.values()}:
        some = {key: tensor for key, tensor in tensors.items() if tensor.dtype == dtype}
        flat = torch.cat([_padded(tensor) for tensor in some.values()]).to(device)
        pieces = flat.split([len(_padded(tensor)) for tensor in some.values()])
        moved |= {key: p[: t.numel()].view(t.shape) for (key, t), p in zip(some.items(), pieces, strict=True)}
    return _rebuilt(record, moved)


def _collect(record: Any, tensors: dict[int, torch.Tensor]) -> None:
    for name, value in _fields(record):
        if isinstance(value, torch.Tensor) and name != "cu_seqlens" and value.device.type == "cpu":
            tensors[id(value)] = value
        elif dataclasses.is_dataclass(value):
            _collect(value, tensors)


def _rebuilt(record: Any, moved: dict[int, torch.Tensor]) -> Any:
    changes = {
        name: _rebuilt(value, moved) if dataclasses.is_dataclass(value) else moved.get(id(value), value)
        for name, value in _fields(record)
    }
    return dataclasses.replace(record, **changes)


def _fields(record: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(record, field.name)) for field in dataclasses.fields(record)]


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -len(flat) % ALIGNMENT))
