"""Group-relative advantage: (reward − mean) / (std + eps), within one group.

From DeepSeekMath (arXiv 2402.03300). `std`: "population" divides by n, "sample" by n − 1 (they differ by
√(n/(n−1))), "none" leaves the difference as it is (Dr. GRPO, arXiv 2503.20783).
"""

import statistics
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

EPS = 1e-4
"""Added to the deviation, so that a group of nearly equal rewards gets no huge advantages. As in TRL."""
Clip = Annotated[
    Annotated[float, Field(gt=0)] | tuple[Annotated[float, Field(le=0)], Annotated[float, Field(gt=0)]] | None,
    Field(description="bounds of the advantages: c is [-c, c]; [0, c] trains only answers above their group"),
]


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


def bounded(advantages: list[float], clip: Clip) -> list[float]:
    """The advantages, clipped to the bounds; None: no bounds. Every formula shares this.

    With a lower bound of 0, answers that did not beat their group have advantage 0. They stay in the batch: they still
    count in the denominators of averages and in the KL term. So the step is that of all answers with some terms left
    out, and not a larger step over fewer answers.
    """
    if clip is None:
        return advantages
    lowest, highest = clip if isinstance(clip, tuple) else (-clip, clip)
    return [min(highest, max(lowest, advantage)) for advantage in advantages]
