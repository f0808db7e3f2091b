"""Group-relative advantage: (reward − mean) / (std + eps), within one group.

From DeepSeekMath (arXiv 2402.03300). `std`: "population" divides by n, "sample" by n − 1 (they differ by
√(n/(n−1))), "none" leaves the difference as it is (Dr. GRPO, arXiv 2503.20783).
"""

import statistics
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from podium.advantage._bounds import Clip, PositiveOnly, bounded


def grpo(
    rewards: Sequence[float],
    *,
    std: Annotated[Literal["population", "sample", "none"], Field(description="what to divide by")] = "population",
    eps: Annotated[float, Field(ge=0, description="added to the deviation")] = 1e-4,
    clip: Clip = None,
    positive_only: PositiveOnly = False,
) -> list[float]:
    """One advantage a reward; at least two rewards."""
    mean = statistics.fmean(rewards)
    scale = 1.0
    if std != "none":
        scale = eps + (statistics.pstdev(rewards) if std == "population" else statistics.stdev(rewards))
    return bounded([(reward - mean) / scale for reward in rewards], clip, positive_only)
