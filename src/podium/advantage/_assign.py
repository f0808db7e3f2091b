"""Stage 4: the advantages of each group, from its own rewards alone, and the bounds that every advantage shares.

With a lower bound of 0, answers that did not beat their group have advantage 0. They stay in the batch: they still
count in the denominators of averages and in the KL term. So the step is that of all answers with some terms left out,
and not a larger step over fewer answers.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Annotated

from pydantic import Field

from podium.errors import InputError
from podium.records import Group
from podium.stages import AdvantageFunction


def assign_advantages(groups: Sequence[Group], function: AdvantageFunction) -> list[Group]:
    """Exactly 0 if all rewards of a group are equal, and for a rollout without a reward."""
    return [replace(group, advantages=_of_group(group, function)) for group in groups]


def _of_group(group: Group, function: AdvantageFunction) -> tuple[float, ...]:
    if not group.has_signal:
        return (0.0,) * len(group.rollouts)
    values = iter(check_advantages(function, [reward for reward in group.rewards if reward is not None]))
    return tuple(0.0 if reward is None else next(values) for reward in group.rewards)


def check_advantages(function: AdvantageFunction, rewards: Sequence[float]) -> list[float]:
    """The advantages that `function` returns; raises `InputError` unless they are one finite number per reward."""
    given = function(rewards)
    try:
        made = [float(value) for value in islice(given, len(rewards) + 1)]
    except (TypeError, ValueError, OverflowError):
        made = []
    if len(made) != len(rewards) or not all(map(math.isfinite, made)):
        raise InputError(
            f"advantage: the rewards {rewards!r:.120} gave {given!r:.120}; return one finite number per reward"
        )
    return made


Clip = Annotated[
    Annotated[float, Field(gt=0)] | tuple[Annotated[float, Field(le=0)], Annotated[float, Field(gt=0)]] | None,
    Field(description="bounds of the advantages: c is [-c, c]; [0, c] trains only answers above their group"),
]


def bounded(advantages: Sequence[float], clip: Clip) -> list[float]:
    """The advantages, clipped to the bounds; None: no bounds."""
    if clip is None:
        return list(advantages)
    lowest, highest = clip if isinstance(clip, tuple) else (-clip, clip)
    return [min(highest, max(lowest, advantage)) for advantage in advantages]
