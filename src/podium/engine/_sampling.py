"""Drawing tokens from logits, each row with a random number of its own.

In: logits `[B, vocabulary]`, a seed a row, how many tokens the row has drawn. Out: an id and its logprob a row. The
random number is a hash of (seed, index), so a draw depends on no global state, on no other row and on no device, and
costs no generator object a row.
"""

import torch

from podium.records import Sampling

_UNIFORM_BITS = 40
"""Resolution of the uniform number; few enough that u · total stays below total in float64."""

BLOCK_WIDTH = 512
"""Ids of a block, the last of which has fewer: few enough to be summed at once, many enough that blocks are few."""


def draw(
    logits: torch.Tensor, seeds: torch.Tensor, indices: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids `[B]`, logprobs `[B]`) of the distribution that was really drawn from; greedy: of the plain softmax."""
    if sampling.temperature == 0:
        logprobs = logits.float().log_softmax(-1)
        ids = logprobs.argmax(-1)
    else:
        logprobs = _restrict(logits.float() / sampling.temperature, sampling).log_softmax(-1)
        cumulative = logprobs.double().exp().cumsum(-1)
        target = uniform(seeds, indices) * cumulative[:, -1]
        ids = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return ids, logprobs.gather(-1, ids[:, None])[:, 0]


def block_masses(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """`[rows, blocks]`: logsumexp over each block of ids. `temperature` is a float32 scalar."""
    padded = torch.nn.functional.pad(logits, (0, -logits.shape[1] % BLOCK_WIDTH), value=-torch.inf)
    return (padded.view(len(logits), -1, BLOCK_WIDTH) / temperature).logsumexp(-1)


def draw_by_block(
    logits: torch.Tensor, masses: torch.Tensor, seeds: torch.Tensor, indices: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`draw` from the whole distribution without reading all of it again: first a block of ids by its mass, then an id
    in it.

    The same random number decides both, so it is the same id but for rounding.
    """
    rows = torch.arange(len(logits), device=logits.device)
    normaliser = masses.logsumexp(-1)
    cumulative = (masses - normaliser[:, None]).double().exp().cumsum(-1)
    target = uniform(seeds, indices) * cumulative[:, -1]
    block = (cumulative <= target[:, None]).sum(-1)
    before = torch.where(block > 0, cumulative[rows, (block - 1).clamp(min=0)], 0.0)
    chosen = _block(logits, block) / temperature
    inside = (chosen - normaliser[:, None]).double().exp().cumsum(-1)
    # As a share of the block, since its mass was summed in float32 and `inside` was not.
    share = ((target - before) / (cumulative[rows, block] - before)).clamp(max=1 - 2**-50)
    place = (inside <= (share * inside[:, -1])[:, None]).sum(-1)
    return block * BLOCK_WIDTH + place, chosen[rows, place] - normaliser


def _block(logits: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """`[rows, BLOCK_WIDTH]`: the logits of one block a row, −inf beyond the vocabulary."""
    columns = block[:, None] * BLOCK_WIDTH + torch.arange(BLOCK_WIDTH, device=logits.device)
    last = logits.shape[1] - 1
    return logits.gather(1, columns.clamp(max=last)).masked_fill(columns > last, -torch.inf)


def draw_likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`draw` at temperature 0 without a second tensor of the logits' size."""
    return logits.argmax(-1), logits.amax(-1) - logits.logsumexp(-1)


def uniform(seeds: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """A number in [0, 1) a row: SplitMix64 of the seed and the index (Steele, Lea & Flood 2014)."""
    state = _mix(seeds) + (indices + 1) * _signed(0x9E3779B97F4A7C15)
    bits = _mix(state) >> (64 - _UNIFORM_BITS)  # arithmetic shift: the sign bit comes along
    return (bits & ((1 << _UNIFORM_BITS) - 1)).double() / (1 << _UNIFORM_BITS)


def _restrict(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """−inf outside top-k, then outside the smallest set whose probability reaches top-p."""
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, places = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        is_beyond = before >= sampling.top_p
        is_beyond[:, 0] = False  # the likeliest stays, even where top_p is 0 in the precision of the logits
        outside = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, places, is_beyond)
        logits = logits.masked_fill(outside, -torch.inf)
    return logits


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
