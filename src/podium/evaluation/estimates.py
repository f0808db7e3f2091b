"""How certain a held-out number is: pass@k, intervals, and the comparison of two models on the same prompts.

The unit is a prompt: its rollouts share its difficulty, so they are averaged first, and prompts are resampled. All
intervals are 95 % intervals, and seeded: the same results give the same interval.
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
"""Random numbers per batch, which limits memory."""


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Two models on the same prompts: the first minus the second."""

    difference: Estimate
    num_prompts: int
    only_first: int
    """Prompts on which the first did better."""
    only_second: int
    p_value: float | None
    """McNemar's exact test if each prompt is right or wrong; else None."""

    @property
    def is_told_apart(self) -> bool:
        """Whether the difference is significant: by the test if there is one, else if the interval excludes 0."""
        if self.p_value is not None:
            return self.p_value < ALPHA
        return not self.difference.low <= 0 <= self.difference.high


def pass_at_k(num_rollouts: int, num_correct: int, k: int) -> float:
    """The unbiased estimate that at least one of k drawn rollouts is correct: 1 − C(n−c, k) / C(n, k)."""
    return 1.0 - math.comb(num_rollouts - num_correct, k) / math.comb(num_rollouts, k)


def wilson(num_successes: float, count: int) -> tuple[float, float]:
    """Wilson's score interval of a share. Unlike mean ± error it stays within 0 … 1, even for small counts."""
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
    """The estimate of a share from each prompt's share.

    Wilson's interval if every value is 0 or 1, or all are equal (a bootstrap would then claim certainty); else the
    bootstrap's.
    """
    mean = fmean(values)
    is_plain = all(value in (0.0, 1.0) for value in values) or len(set(values)) == 1
    return Estimate(mean, *(wilson(mean * len(values), len(values)) if is_plain else bootstrap(values)))


def of_mean(values: Sequence[float]) -> Estimate:
    """The estimate of any other mean, with the bootstrap's interval."""
    return Estimate(fmean(values), *bootstrap(values))


def compare(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Both sequences have one value per prompt, for the same prompts in the same order."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    is_plain = all(value in (0.0, 1.0) for value in (*first, *second))
    p_value = mcnemar(better, worse) if is_plain else None
    return Comparison(of_mean(differences), len(differences), better, worse, p_value)


def mcnemar(only_first: int, only_second: int) -> float:
    """The p-value of the split of prompts that only one of the two models solves, if both were equally good.

    Exact: a two-sided binomial test of a fair coin.
    """
    count, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(count, i) for i in range(fewer + 1))
    return min(1.0, 2 * tail / 2**count)
