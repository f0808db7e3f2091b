"""The names of the trained weights, and exact proof that an engine holds them.

Logprobs cannot prove it: at a small learning rate a step changes them by less than bfloat16 rounding. So an engine
shows the tensors that it samples with (`Held`), in its own precision: the two halves of each adapter, the scale and the
output of the adapter branch on a fixed input; or the full weights. `difference` compares them with the trainer's.
Between processes, a checksum replaces each tensor (`sealed`). It is a sum of integers, so its order does not matter and
every device computes the same; the host waits for the device once. `mean_gap` and `allowed_gap` compare logprobs.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import fmean
from typing import Any

import torch

BLOCK = 1 << 15
"""Integers per partial sum; a block of them fits into a CPU's cache."""
ROWS_AT_ONCE = 16
BRANCH_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
"""Allowed difference of a branch's output, relative to its norm."""
CANCELLED = 0.2
"""For that tolerance, a branch's output counts as at least this share of its usual norm."""
NUM_VIEWS = 4
"""How many numbers represent one output of a branch: sums with fixed signs."""


def named_trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters that an engine loads, by name; an adapter's are `<layer>.lora_A` and `<layer>.lora_B`."""
    adapted = [(name, each) for name, each in model.named_modules() if "default" in getattr(each, "lora_A", ())]
    if not adapted:
        yield from model.named_parameters()
    for name, module in adapted:
        yield f"{name}.lora_A", module.lora_A["default"].weight  # type: ignore[index,union-attr]
        yield f"{name}.lora_B", module.lora_B["default"].weight  # type: ignore[index,union-attr]


@dataclass(frozen=True)
class Shown:
    """A tensor that an engine samples with, or its checksum."""

    dtype: str
    tensor: torch.Tensor | None = None
    checksum: int | None = None
    columns: tuple[int, ...] | None = None
    """Only these columns, if a kernel stores the others in a form that cannot be read."""
    is_scaled: bool = False
    """Whether it is already multiplied by the adapter's scale."""


@dataclass(frozen=True)
class Held:
    """What an engine holds, read from its own tensors after a load."""

    shown: Mapping[str, Shown]
    """By the names of `named_trained`."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """The adapter's scale, per adapted layer."""
    branches: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """`branch_views` of each adapted layer, if its adapter is computed as a separate branch."""
    unseen: tuple[str, ...] = ()
    """Weights that cannot be read; only logprobs can check these."""
    faults: tuple[str, ...] = ()
    """Errors that the engine found in itself, such as a merged layer that is not base + scale·B·A."""

    def sealed(self) -> "Held":
        """The same with checksums instead of tensors."""
        tensors = {name: shown.tensor for name, shown in self.shown.items() if shown.tensor is not None}
        sums = dict(zip(tensors, checksums([*tensors.values()]), strict=True))
        made = {name: replace(self.shown[name], tensor=None, checksum=each) for name, each in sums.items()}
        return replace(self, shown={**self.shown, **made})


def shown(tensor: torch.Tensor, **others: Any) -> Shown:
    return Shown(_name(tensor.dtype), tensor.detach(), **others)


@torch.no_grad()
def difference(weights: Iterable[tuple[str, torch.Tensor]], held: Held, scale: float | None) -> str | None:
    """How `held` differs from the trainer's weights, for people; None if it does not. `scale` is the adapter's."""
    if held.faults:
        return held.faults[0]
    problems: list[str] = []
    flags: dict[str, torch.Tensor] = {}
    halves: dict[str, torch.Tensor] = {}
    for name, tensor in weights:  # to the end: ranks that shard the weights gather them together
        flag = None if name in held.unseen else _is_other(name, tensor, held.shown.get(name), scale)
        if isinstance(flag, str):
            problems.append(flag)
        elif flag is not None:
            flags[name] = flag
        if held.branches and name in held.shown and ".lora_" in name:
            halves[name] = _as_held(tensor, held.shown[name], scale)
    others = [name for name, is_other in zip(flags, _listed([*flags.values()]), strict=True) if is_other]
    problems += [f"its {name} holds other numbers than the trainer's" for name in others]
    problems += [
        f"it multiplies the adapter of {layer} by {found:g}, the trainer by {scale:g}"
        for layer, found in held.scales.items()
        if found != scale
    ]
    return problems[0] if problems else _other_branch(held, halves, scale)


def _is_other(name: str, tensor: torch.Tensor, theirs: Shown | None, scale: float | None) -> torch.Tensor | str | None:
    """A flag, still on the device; None if both are the same memory; a text if they cannot be compared."""
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
    """Whether a member of a pool holds the same weights as some other member that stores them in the same form.

    True if there is nothing to compare with.
    """
    if held is None:
        return True

    def forms(of: Mapping[str, Shown]) -> dict[str, Shown]:
        return {name: replace(each, checksum=None) for name, each in of.items()}

    own = held.sealed().shown
    alike = [each.shown for each in (other.sealed() for other in others) if forms(each.shown) == forms(own)]
    return not held.faults and (not alike or own in alike)


def _as_held(tensor: torch.Tensor, theirs: Shown, scale: float | None) -> torch.Tensor:
    """The trainer's tensor as the engine should hold it."""
    expected = tensor.detach().to(getattr(torch, theirs.dtype))
    if theirs.columns is not None:
        expected = expected[..., list(theirs.columns)] + 0.0  # a kernel that returns columns turns -0 into 0
    return expected * (scale or 0.0) if theirs.is_scaled else expected


def _other_branch(held: Held, halves: Mapping[str, torch.Tensor], scale: float | None) -> str | None:
    """Compares each branch's output, within the rounding of the engine's precision, relative to the output's norm.

    `halves` are as the engine holds them, so only the products round. With a rank of 1 or 2 the inner sum may nearly
    cancel out; the tolerance is then relative to a share of the usual norm.
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
                f"the adapter's branch of {layer} gives an output that differs by {gap:.2g}; {allowed:.2g} is allowed"
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
    """A few numbers that represent an output `[out]`; each is about as large as the output's norm."""
    return _signs(NUM_VIEWS, output.shape[-1], output.device) @ output.float()


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A checksum of each tensor's bytes; waits for the device once."""
    return _listed([_checksum(tensor) for tensor in tensors])


def weights_digest(weights: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """A digest of names, dtypes, shapes and checksums, for ranks that compare what they hold."""
    found = hashlib.sha256()
    for name, tensor in weights:  # one at a time: sharded weights are gathered and released one by one
        [checksum] = checksums([tensor])
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {checksum}\n".encode())
    return found.digest()


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A 63-bit integer, still on the device: the bytes as integers, each times a fixed odd number for its position."""
    numbers = _as_integers(tensor.detach())
    rows = numbers[: len(numbers) // BLOCK * BLOCK].view(-1, BLOCK)
    rest = numbers[rows.numel() :]
    factors = _odd_numbers(0, BLOCK, tensor.device)
    sums = [(rows[start : start + ROWS_AT_ONCE] * factors).sum(1) for start in range(0, len(rows), ROWS_AT_ONCE)]
    all_sums = torch.cat([*sums, (rest * factors[: len(rest)]).sum()[None]])
    return (all_sums * _odd_numbers(BLOCK, len(all_sums), tensor.device)).sum() & ((1 << 63) - 1)


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes as int64, padded with zeros at the end."""
    flat = tensor.contiguous().view(-1)
    missing = -len(flat) % (8 // flat.element_size())
    if missing or flat.storage_offset() * flat.element_size() % 8:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    return flat.view(torch.int64)


@cache
def _odd_numbers(start: int, count: int, device: torch.device) -> torch.Tensor:
    return _mixed(torch.arange(start, start + count, device=device)) | 1


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Maps each int64 to a pseudo-random one, the same on every device."""
    for factor in (-7046029254386353131, -4658895280553007687):
        numbers = (numbers + 0x2545F491) * factor
        numbers = numbers ^ (numbers >> 29)
    return numbers


def fixed_signs(seed: int, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """Ones and minus ones, the same on every device."""
    numbers = _mixed(torch.arange(shape.numel(), device=device) + 1_000_003 * (seed + 1))
    return (((numbers >> 13) & 1).float() * 2 - 1).view(shape)


@cache
def _signs(rows: int, width: int, device: torch.device) -> torch.Tensor:
    return fixed_signs(0, torch.Size((rows, width)), device)


def _listed(numbers: Sequence[torch.Tensor]) -> list[Any]:
    return torch.stack(list(numbers)).tolist() if numbers else []


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


MAX_UNLIKELINESS = 10.0


def mean_gap(logprobs: Sequence[float], others: Sequence[float]) -> float:
    """Mean absolute difference; not finite if a logprob is not."""
    return fmean(abs(a - b) for a, b in zip(logprobs, others, strict=True))


def allowed_gap(tolerance: float, logprobs: Sequence[float]) -> float:
    """The tolerance, up to ten times larger for unlikely tokens."""
    return tolerance * unlikeliness(logprobs)


def unlikeliness(logprobs: Sequence[float]) -> float:
    """The mean absolute logprob, between 1 and 10.

    The policy is not trained to write the probe's tokens, so they may become very unlikely, and the rounding error of a
    logprob grows with its size.
    """
    return min(MAX_UNLIKELINESS, max(1.0, fmean(map(abs, logprobs))))
