"""Whether two sides hold the same weights: by the logprobs that they give to the same tokens."""

from collections.abc import Sequence
from statistics import fmean

MOST_TIMES = 10.0


def mean_gap(logprobs: Sequence[float], others: Sequence[float]) -> float:
    """Mean absolute difference; infinite or no number where a logprob is."""
    return fmean(abs(a - b) for a, b in zip(logprobs, others, strict=True))


def allowed_gap(tolerance: float, logprobs: Sequence[float]) -> float:
    """The tolerance, and up to ten times as much where the tokens are unlikely."""
    return tolerance * unlikeliness(logprobs)


def unlikeliness(logprobs: Sequence[float]) -> float:
    """The mean logprob's size, between one and ten.

    A probe is not what the policy is trained to write, so it may become very unlikely; what rounding does to a logprob
    grows with it.
    """
    return min(MOST_TIMES, max(1.0, fmean(map(abs, logprobs))))
