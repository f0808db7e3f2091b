"""Drawing tokens from logits. Each row has its own sampling and its own random number.

In: logits `[B, vocabulary]`, one seed per row, and how many tokens the row has drawn. Out: one id and its logprob per
row. The random number is a hash of (seed, index), so a draw depends on no global state, no other row and no device, and
needs no generator object per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from podium.records import Sampling

_UNIFORM_BITS = 40
"""Resolution of the uniform number; few enough that u · total stays below total in float64."""
BLOCK_WIDTH = 512
"""Ids per block; the last block has fewer. Few enough to be summed at once, many enough that blocks are few."""
NO_TOP_K = 1 << 30
"""Larger than any vocabulary."""

Kind = Literal["plain", "greedy", "mixed"]
"""What the rows of a batch need: the whole distribution, only its likeliest id, or anything else."""


def kind_of(samplings: Sequence[Sampling]) -> Kind:
    """The cheapest way to draw that serves all of these."""
    if all(each.temperature == 0 for each in samplings):
        return "greedy"
    is_plain = all(each.temperature > 0 and each.top_k is None and each.top_p is None for each in samplings)
    return "plain" if is_plain else "mixed"


@dataclass(frozen=True)
class RowSampling:
    """`Sampling` as tensors with one row per rollout."""

    temperature: torch.Tensor
    """float32; 1 for a greedy row, whose logprobs are those of the plain softmax."""
    is_greedy: torch.Tensor
    """bool"""
    top_k: torch.Tensor
    """int64"""
    top_p: torch.Tensor
    """float32; 1: no restriction."""
    stop_ids: torch.Tensor
    """int64 `[rows, stops]`, padded with −1."""
    limit: torch.Tensor
    """int64, the most tokens of an answer."""

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device, num_stops: int | None = None) -> RowSampling:
        """`num_stops` is the width of `stop_ids`; by default the most that a row has."""
        stops = num_stops or max(1, *(len(each.stop_ids) for each in samplings))
        greedy = [each.temperature == 0 for each in samplings]
        pairs = list(zip(samplings, greedy, strict=True))
        columns = {
            "temperature": torch.tensor([each.temperature or 1.0 for each in samplings]),
            "is_greedy": torch.tensor(greedy),
            "top_k": torch.tensor([NO_TOP_K if bare else each.top_k or NO_TOP_K for each, bare in pairs]),
            "top_p": torch.tensor([1.0 if bare or each.top_p is None else each.top_p for each, bare in pairs]),
            "stop_ids": torch.tensor([[*each.stop_ids, *(-1,) * (stops - len(each.stop_ids))] for each in samplings]),
            "limit": torch.tensor([each.max_new_tokens for each in samplings]),
        }
        return cls(**{name: column.to(device) for name, column in columns.items()})

    def select(self, rows: torch.Tensor) -> RowSampling:
        return RowSampling(**{name: column[rows] for name, column in vars(self).items()})


def draw(
    logits: torch.Tensor, seeds: torch.Tensor, indices: torch.Tensor, how: RowSampling, kind: Kind
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids `[B]`, logprobs `[B]`) of the distribution that was really drawn from; greedy: of the plain softmax."""
    scaled = logits.float() / how.temperature[:, None]
    logprobs = (_restrict(scaled, how) if kind == "mixed" else scaled).log_softmax(-1)
    ids = logprobs.argmax(-1) if kind != "plain" else torch.zeros_like(seeds)
    if kind != "greedy":
        cumulative = logprobs.double().exp().cumsum(-1)
        target = uniform(seeds, indices) * cumulative[:, -1]
        drawn = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
        ids = torch.where(how.is_greedy, ids, drawn)
    return ids, logprobs.gather(-1, ids[:, None])[:, 0]


def block_masses(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """`[rows, blocks]`: logsumexp over each block of ids. `temperature` is float32 `[rows]`."""
    padded = torch.nn.functional.pad(logits, (0, -logits.shape[1] % BLOCK_WIDTH), value=-torch.inf)
    return (padded.view(len(logits), -1, BLOCK_WIDTH) / temperature[:, None, None]).logsumexp(-1)


def draw_by_block(
    logits: torch.Tensor, masses: torch.Tensor, seeds: torch.Tensor, indices: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws from the whole distribution without reading all of it again: first a block of ids by its mass, then an id
    in that block.

    The same random number decides both, so apart from rounding the id is the one that `draw` finds.
    """
    rows = torch.arange(len(logits), device=logits.device)
    normaliser = masses.logsumexp(-1)
    cumulative = (masses - normaliser[:, None]).double().exp().cumsum(-1)
    target = uniform(seeds, indices) * cumulative[:, -1]
    block = (cumulative <= target[:, None]).sum(-1)
    before = torch.where(block > 0, cumulative[rows, (block - 1).clamp(min=0)], 0.0)
    chosen = _block(logits, block) / temperature[:, None]
    inside = (chosen - normaliser[:, None]).double().exp().cumsum(-1)
    # As a share of the block, since its mass was summed in float32 and `inside` was not.
    share = ((target - before) / (cumulative[rows, block] - before)).clamp(max=1 - 2**-50)
    place = (inside <= (share * inside[:, -1])[:, None]).sum(-1)
    return block * BLOCK_WIDTH + place, chosen[rows, place] - normaliser


def _block(logits: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """`[rows, BLOCK_WIDTH]`: the logits of one block per row, −inf beyond the vocabulary."""
    columns = block[:, None] * BLOCK_WIDTH + torch.arange(BLOCK_WIDTH, device=logits.device)
    last = logits.shape[1] - 1
    return logits.gather(1, columns.clamp(max=last)).masked_fill(columns > last, -torch.inf)


def draw_likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`draw` at temperature 0 without a second tensor of the logits' size."""
    return logits.argmax(-1), logits.amax(-1) - logits.logsumexp(-1)


def uniform(seeds: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """A number in [0, 1) per row: SplitMix64 of the seed and the index (Steele, Lea & Flood 2014)."""
    state = _mix(seeds) + (indices + 1) * _signed(0x9E3779B97F4A7C15)
    bits = _mix(state) >> (64 - _UNIFORM_BITS)  # arithmetic shift: the sign bit comes along
    return (bits & ((1 << _UNIFORM_BITS) - 1)).double() / (1 << _UNIFORM_BITS)


def _restrict(logits: torch.Tensor, how: RowSampling) -> torch.Tensor:
    """−inf outside each row's top-k, then outside the smallest set whose probability reaches its top-p."""
    ordered, places = logits.sort(dim=-1, descending=True)
    kth = ordered.gather(-1, how.top_k.clamp(max=logits.shape[-1])[:, None] - 1)
    ordered = ordered.masked_fill(ordered < kth, -torch.inf)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    is_beyond = (before >= how.top_p[:, None]) & (how.top_p < 1)[:, None]
    is_beyond[:, 0] = False  # the likeliest id stays, even if top_p is 0 in the precision of the logits
    outside = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, places, is_beyond)
    return logits.masked_fill(outside | (logits < kth), -torch.inf)


def _mix(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on int64, which wraps around as uint64 does."""
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: int64's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant
