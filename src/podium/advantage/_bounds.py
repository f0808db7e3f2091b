"""The options that every advantage shares: how far its values may go.

With `positive_only` the answers that did not beat their group have advantage 0. They stay in the batch: they count in
the denominators of averages, and in the KL term, as before. So the step is that of all answers with some terms left
out, and not a larger step over fewer answers.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

Clip = Annotated[float | None, Field(gt=0, description="advantages are cut to [-clip, clip]; by default they are not")]
PositiveOnly = Annotated[bool, Field(description="negative advantages become 0: only answers above their group train")]


def bounded(advantages: Sequence[float], clip: float | None, positive_only: bool) -> list[float]:
    """The advantages, cut."""
    highest = float("inf") if clip is None else clip
    lowest = 0.0 if positive_only else -highest
    return [min(highest, max(lowest, advantage)) for advantage in advantages]
