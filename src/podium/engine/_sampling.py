"""Drawing tokens from logits, each row with a random number of its own.

In: logits `[B, vocabulary]`, a seed a row, how many tokens the row has drawn. Out: an id and its logprob a row. The
random number is a hash of (seed, index), so a draw depends on no global state, on no other row and on no device, and
costs no generator object a row.
"""

import torch

from podium.records import Sampling

_UNIFORM_BITS = 40
"""Resolution of the uniform number; few enough that u · total stays below total in float64."""


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
        outside = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, places, before >= sampling.top_p)
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
