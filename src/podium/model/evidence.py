"""Proof without rounding that an engine holds the trainer's weights.

Logprobs cannot give it: at a small learning rate a step moves them by less than bfloat16 rounds. So an engine shows the
tensors that it samples with (`Held`), in its own precision: the two halves of each adapter, the scale and the output
of the adapter branch on a fixed input; or the full weights. `difference` compares them with the trainer's. Between two
processes each tensor travels as a checksum (`sealed`). It is a sum of integers, so the order of the sum does not matter
and any device gives the same; a GPU computes it where the tensor lies and the host waits once.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

BLOCK = 1 << 15
"""Integers that are summed first; a row of them stays in a CPU's cache."""
ROWS_AT_ONCE = 16
BRANCH_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
"""Of a branch's output, relative to its own length."""
CANCELLED = 0.2
"""A branch's output is taken to be at least this share of its usual length."""
NUM_VIEWS = 4
"""Numbers that stand for one output of a branch: sums with fixed signs."""


@dataclass(frozen=True)
class Shown:
    """A tensor that an engine samples with, or its checksum."""

    dtype: str
    tensor: torch.Tensor | None = None
    checksum: int | None = None
    columns: tuple[int, ...] | None = None
    """Only these columns, where a kernel keeps the rest in a form that nobody can read."""
    is_scaled: bool = False
    """Multiplied with the adapter's scale already."""


@dataclass(frozen=True)
class Held:
    """What an engine holds, read from its own tensors after a load."""

    shown: Mapping[str, Shown]
    """By the names of `Policy.named_weights`."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """Of each adapted layer."""
    branches: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """`branch_views` of each adapted layer, where its adapter is a branch of its own."""
    unseen: tuple[str, ...] = ()
    """Weights that lie where they cannot be read; logprobs alone speak for them."""
    faults: tuple[str, ...] = ()
    """What the engine found wrong with itself, such as a merged layer that is not base + scale·B·A."""

    def sealed(self) -> "Held":
        """With checksums in the place of tensors."""
        names = [name for name, shown in self.shown.items() if shown.tensor is not None]
        sums = checksums([self.shown[name].tensor for name in names])  # type: ignore[misc]
        made = {
            name: replace(self.shown[name], tensor=None, checksum=each) for name, each in zip(names, sums, strict=True)
        }
        return replace(self, shown={**self.shown, **made})

    def to_json(self) -> dict[str, Any]:
        shown = {
            name: [each.dtype, f"{each.checksum:016x}", each.columns, each.is_scaled]
            for name, each in self.sealed().shown.items()
        }
        branches = {name: list(values) for name, values in self.branches.items()}
        return {
            "shown": shown,
            "scales": dict(self.scales),
            "branches": branches,
            "unseen": self.unseen,
            "faults": self.faults,
        }

    @classmethod
    def from_json(cls, said: Any) -> "Held":
        """Raises `ValueError`, `KeyError` or `TypeError` for anything else than `to_json` makes."""
        shown = {
            str(name): Shown(str(dtype), None, int(checksum, 16), columns and tuple(map(int, columns)), bool(is_scaled))
            for name, (dtype, checksum, columns, is_scaled) in said["shown"].items()
        }
        scales = {str(name): float(scale) for name, scale in said["scales"].items()}
        branches = {str(name): [float(value) for value in values] for name, values in said["branches"].items()}
        return cls(shown, scales, branches, tuple(map(str, said["unseen"])), tuple(map(str, said["faults"])))


def shown(tensor: torch.Tensor, **others: Any) -> Shown:
    return Shown(_name(tensor.dtype), tensor.detach(), **others)


@torch.no_grad()
def difference(weights: Iterable[tuple[str, torch.Tensor]], held: Held, scale: float | None) -> str | None:
    """What of `held` is not the trainer's, for people; None where all of it is. `scale` is that of the adapter."""
    if held.faults:
        return held.faults[0]
    flags: dict[str, torch.Tensor | str | None] = {}
    halves: dict[str, torch.Tensor] = {}
    for name, tensor in weights:  # to the end: ranks that share the weights give them together
        flags[name] = None if name in held.unseen else _is_other(name, tensor, held.shown.get(name), scale)
        if held.branches and name in held.shown and ".lora_" in name:
            halves[name] = _as_held(tensor, held.shown[name], scale)
    for flag in flags.values():
        if isinstance(flag, str):
            return flag
    asked = {name: flag for name, flag in flags.items() if isinstance(flag, torch.Tensor)}
    for name, is_other in zip(asked, _listed(list(asked.values())), strict=True):
        if is_other:
            return f"its {name} holds other numbers than the trainer's"
    return _other_scale(held, scale) or _other_branch(held, halves, scale)


def _is_other(name: str, tensor: torch.Tensor, theirs: Shown | None, scale: float | None) -> torch.Tensor | str | None:
    """A flag, still on the device; None where both are the same memory; words where they cannot be compared."""
    if theirs is None:
        return f"it does not hold {name}"
    expected = _as_held(tensor, theirs, scale)
    if theirs.tensor is None:
        return _checksum(expected) != theirs.checksum
    if expected.shape != theirs.tensor.shape:
        return f"its {name} has the shape {tuple(theirs.tensor.shape)}, the trainer's {tuple(expected.shape)}"
    if expected.data_ptr() == theirs.tensor.data_ptr():
        return None
    return (expected.to(theirs.tensor.device) != theirs.tensor).any()


def is_among(held: Held | None, others: Iterable[Held]) -> bool:
    """Whether a member of a pool holds what another one holds; those that keep weights in another form do not count.

    True where it cannot be said.
    """
    if held is None:
        return True
    own = held.sealed().shown
    alike = [each.shown for each in (other.sealed() for other in others) if _forms(each.shown) == _forms(own)]
    return not held.faults and (not alike or own in alike)


def _forms(of: Mapping[str, Shown]) -> dict[str, tuple[Any, ...]]:
    return {name: (each.dtype, each.columns, each.is_scaled) for name, each in of.items()}


def _as_held(tensor: torch.Tensor, theirs: Shown, scale: float | None) -> torch.Tensor:
    """The trainer's tensor as the engine should hold it."""
    expected = tensor.detach().to(getattr(torch, theirs.dtype))
    if theirs.columns is not None:
        expected = expected[..., list(theirs.columns)] + 0.0  # a kernel that brings columns out makes 0 of -0
    return expected * (scale or 0.0) if theirs.is_scaled else expected


def _other_scale(held: Held, scale: float | None) -> str | None:
    for layer, found in held.scales.items():
        if found != scale:
            return f"it multiplies the adapter of {layer} by {found:g}, the trainer by {scale:g}"
    return None


def _other_branch(held: Held, halves: Mapping[str, torch.Tensor], scale: float | None) -> str | None:
    """Each branch's output, within the rounding of the engine's precision, relative to its own length.

    `halves` are as the engine holds them, so only the products round. With a rank of 1 or 2 the inner sum may nearly
    cancel out; then a share of the usual length is allowed.
    """
    made: list[torch.Tensor] = []
    for layer in held.branches:
        a, b = halves[f"{layer}.lora_A"], halves[f"{layer}.lora_B"]
        factor = 1.0 if held.shown[f"{layer}.lora_B"].is_scaled else scale or 0.0
        output = branch_output(a, b, factor)
        usual = abs(factor) * a.float().norm() * b.float().norm() / len(a) ** 0.5
        made.append(torch.cat([branch_views(output), output.norm()[None], usual[None]]))
    for layer, (*expected, length, usual) in zip(held.branches, _listed(made), strict=True):
        allowed = BRANCH_TOLERANCE[held.shown[f"{layer}.lora_B"].dtype] * max(length, CANCELLED * usual)
        gap = max(abs(a - b) for a, b in zip(expected, held.branches[layer], strict=True))
        if not gap <= allowed:
            return (
                f"the adapter's branch of {layer} gives an output that differs by {gap:.2g}, {allowed:.2g} is allowed"
            )
    return None


def branch_input(width: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A fixed input `[1, width]` of ones and minus ones, which every precision holds exactly."""
    return _signs(1, width, device).to(dtype)


def branch_output(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """scale · B·A·x `[out]` of the fixed input, in float32."""
    x = branch_input(a.shape[1], a.device)
    return ((x @ a.float().t()) @ b.float().t())[0] * scale


def branch_views(output: torch.Tensor) -> torch.Tensor:
    """A few numbers that stand for an output `[out]`; each is about as large as the output is long."""
    return _signs(NUM_VIEWS, output.shape[-1], output.device) @ output.float()


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Of the bytes of each tensor; waits for the device once."""
    return _listed([_checksum(tensor) for tensor in tensors])


def weights_digest(weights: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """Of names, types, shapes and checksums: for ranks that compare what they hold."""
    found = hashlib.sha256()
    for name, tensor in weights:  # one at a time: where ranks share the weights, each is gathered and let go
        [checksum] = checksums([tensor])
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {checksum}\n".encode())
    return found.digest()


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """An integer of 63 bits, still on the device: the bytes as integers, times fixed odd numbers, by place."""
    numbers = _as_integers(tensor.detach())
    rows = numbers[: len(numbers) // BLOCK * BLOCK].view(-1, BLOCK)
    rest = numbers[rows.numel() :]
    factors = _odd_numbers(0, BLOCK, tensor.device)
    sums = [(rows[start : start + ROWS_AT_ONCE] * factors).sum(1) for start in range(0, len(rows), ROWS_AT_ONCE)]
    all_sums = torch.cat([*sums, (rest * factors[: len(rest)]).sum()[None]])
    return (all_sums * _odd_numbers(BLOCK, len(all_sums), tensor.device)).sum() & ((1 << 63) - 1)


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes as int64, with zeros at the end where they do not come out even."""
    flat = tensor.contiguous().view(-1)
    missing = -len(flat) % (8 // flat.element_size())
    if missing or flat.storage_offset() * flat.element_size() % 8:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    return flat.view(torch.int64)


@cache
def _odd_numbers(start: int, count: int, device: torch.device) -> torch.Tensor:
    return _mixed(torch.arange(start, start + count, device=device)) | 1


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Each int64 to one that looks random, the same on every device."""
    for factor in (-7046029254386353131, -4658895280553007687):
        numbers = (numbers + 0x2545F491) * factor
        numbers = numbers ^ (numbers >> 29)
    return numbers


def fixed_signs(seed: int, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """Ones and minus ones, the same everywhere."""
    numbers = _mixed(torch.arange(shape.numel(), device=device) + 1_000_003 * (seed + 1))
    return (((numbers >> 13) & 1).float() * 2 - 1).view(shape)


@cache
def _signs(rows: int, width: int, device: torch.device) -> torch.Tensor:
    numbers = _mixed(torch.arange(rows * width, device=device) + 17).view(rows, width)
    return ((numbers >> 13) & 1).float() * 2 - 1


def _listed(numbers: Sequence[torch.Tensor]) -> list[Any]:
    return torch.stack(list(numbers)).tolist() if numbers else []


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
