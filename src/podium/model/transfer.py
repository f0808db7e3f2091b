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


def _collect(value: Any, tensors: dict[int, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        tensors[id(value)] = value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name != "cu_seqlens":
                _collect(getattr(value, field.name), tensors)
    elif isinstance(value, tuple):
        for each in value:
            _collect(each, tensors)


def _rebuilt(value: Any, moved: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return moved.get(id(value), value)
    if isinstance(value, tuple):
        return tuple(_rebuilt(each, moved) for each in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {field.name: _rebuilt(getattr(value, field.name), moved) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **fields)


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -len(flat) % ALIGNMENT))
