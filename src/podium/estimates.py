"""How sure a held-out number is: pass@k, intervals, and what two models' results on the same prompts say.

A prompt is the unit: its rollouts share its difficulty, so they are averaged first and prompts are resampled. All
intervals are of 95 %, and seeded: the same results give the same interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

Z = 1.959963984540054
"""The normal distribution's 97.5 % point."""
ALPHA = 0.05
RESAMPLES = 2000
CHUNK = 1_000_000
"""Numbers drawn at a time: bounds the memory."""


@dataclass(frozen=True)
class Estimate:
    """A number with the interval that holds the true one in 95 of 100 cases."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Two models on the same prompts, the first less the second."""

    difference: Estimate
    num_prompts: int
    only_first: int
    """Prompts on which the first did better."""
    only_second: int
    p_value: float | None
    """McNemar's exact test, where each prompt is right or wrong; else None."""

    @property
    def is_told_apart(self) -> bool:
        """By the test where there is one, else by an interval that does not hold 0."""
        if self.p_value is not None:
            return self.p_value < ALPHA
        return not self.difference.low <= 0 <= self.difference.high


def pass_at_k(num_rollouts: int, num_correct: int, k: int) -> float:
    """The chance that at least one of k rollouts drawn from these is correct: 1 − C(n−c, k) / C(n, k), unbiased."""
    return 1.0 - math.comb(num_rollouts - num_correct, k) / math.comb(num_rollouts, k)


def wilson(num_successes: float, count: int) -> tuple[float, float]:
    """Wilson's score interval of a share. Unlike mean ± error it stays within 0 … 1, also where count is small."""
    share = num_successes / count
    centre = share + Z * Z / (2 * count)
    reach = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    return max(0.0, (centre - reach) / scale), min(1.0, (centre + reach) / scale)


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The middle 95 % of the means of samples drawn with replacement."""
    table, random = np.asarray(values, dtype=np.float64), np.random.default_rng(seed)
    at_a_time = max(1, CHUNK // len(table))
    means = [
        table[random.integers(0, len(table), (min(at_a_time, RESAMPLES - done), len(table)))].mean(axis=1)
        for done in range(0, RESAMPLES, at_a_time)
    ]
    low, high = np.percentile(np.concatenate(means), [100 * ALPHA / 2, 100 * (1 - ALPHA / 2)])
    return float(low), float(high)


def of_share(values: Sequence[float]) -> Estimate:
    """Of a share, from each prompt's own: Wilson's interval where each is 0 or 1, or all are equal (there resampling
    would claim to be certain), else the bootstrap's."""
    mean = fmean(values)
    is_plain = all(value in (0.0, 1.0) for value in values) or len(set(values)) == 1
    return Estimate(mean, *(wilson(mean * len(values), len(values)) if is_plain else bootstrap(values)))


def of_mean(values: Sequence[float]) -> Estimate:
    """Of any other mean, by the bootstrap."""
    return Estimate(fmean(values), *bootstrap(values))


def compare(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """One value a prompt, of the same prompts in the same order."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    is_plain = all(value in (0.0, 1.0) for value in (*first, *second))
    p_value = mcnemar(better, worse) if is_plain else None
    return Comparison(of_mean(differences), len(differences), better, worse, p_value)


def mcnemar(only_first: int, only_second: int) -> float:
    """How likely so uneven a split of the prompts that only one of the two solves is, if both were equally good.

    Exact: two-sided binomial test of a fair coin.
    """
    count, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(count, i) for i in range(fewer + 1))
    return min(1.0, 2 * tail / 2**count)
