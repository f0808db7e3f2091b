"""Stage 4: advantages for each group, by the group's own rewards and nothing else."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from podium.errors import InputError
from podium.records import Group
from podium.stages import AdvantageFunction


def assign_advantages(groups: Sequence[Group], function: AdvantageFunction) -> list[Group]:
    """Exactly 0 where all rewards of a group are equal, and for a rollout without a reward."""
    return [replace(group, advantages=_of_group(group, function)) for group in groups]


def _of_group(group: Group, function: AdvantageFunction) -> tuple[float, ...]:
    if not group.has_signal:
        return (0.0,) * len(group.rollouts)
    values = iter(check_advantages(function, [reward for reward in group.rewards if reward is not None]))
    return tuple(0.0 if reward is None else next(values) for reward in group.rewards)


def check_advantages(function: AdvantageFunction, rewards: Sequence[float]) -> list[float]:
    """What the function makes of these rewards, if that is a finite number for each."""
    given = function(rewards)
    try:
        made = [float(value) for value in islice(given, len(rewards) + 1)]
    except (TypeError, ValueError, OverflowError):
        made = []
    if len(made) != len(rewards) or not all(map(math.isfinite, made)):
        raise InputError(
            f"advantage: the rewards {rewards!r:.120} gave {given!r:.120}; it must be one finite number for each reward"
        )
    return made
