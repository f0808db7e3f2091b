"""Leave-one-out advantage: the reward minus the mean of the others in its group.

    A_i = r_i − mean_{j ≠ i} r_j = n/(n − 1) · (r_i − mean r)

From RLOO (arXiv 2402.14740). Not divided by a deviation, so a group with rare successes does not weigh more.
"""

from collections.abc import Sequence
from statistics import fmean

from podium.advantage.grpo import Clip, bounded


def rloo(rewards: Sequence[float], *, clip: Clip = None) -> list[float]:
    """One advantage per reward; needs at least two rewards."""
    count, mean = len(rewards), fmean(rewards)
    return bounded([count / (count - 1) * (reward - mean) for reward in rewards], clip)
