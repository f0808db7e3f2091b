"""Group-relative advantage: (reward − mean) / (std + eps), within one group.

From DeepSeekMath (arXiv 2402.03300). `std`: "population" divides by n, "sample" by n − 1 (they differ by
√(n/(n−1))), "none" leaves the difference as it is (Dr. GRPO, arXiv 2503.20783).
"""

import statistics
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from podium.advantage._assign import Clip, bounded

EPS = 1e-4
"""Added to the deviation, so that a group of nearly equal rewards gets no huge advantages. As in TRL."""


def grpo(
    rewards: Sequence[float],
    eps: float = EPS,
    *,
    std: Annotated[
        Literal["population", "sample", "none"],
        Field(description="deviation to divide by; none: do not divide (Dr. GRPO)"),
    ] = "population",
    clip: Clip = None,
) -> list[float]:
    """One advantage per reward; needs at least two rewards."""
    mean = statistics.fmean(rewards)
    scale = 1.0
    if std != "none":
        scale = eps + (statistics.pstdev(rewards) if std == "population" else statistics.stdev(rewards))
    return bounded([(reward - mean) / scale for reward in rewards], clip)
