"""Stage 4: advantages for each group, by the group's own rewards and nothing else."""

from collections.abc import Sequence
from dataclasses import replace

from podium.records import Group
from podium.stages import AdvantageFunction


def assign_advantages(groups: Sequence[Group], function: AdvantageFunction) -> list[Group]:
    """Exactly 0 where all rewards of a group are equal, and for a rollout without a reward."""
    return [replace(group, advantages=_of_group(group, function)) for group in groups]


def _of_group(group: Group, function: AdvantageFunction) -> tuple[float, ...]:
    if not group.has_signal:
        return (0.0,) * len(group.rollouts)
    values = iter(function([reward for reward in group.rewards if reward is not None]))
    return tuple(0.0 if reward is None else next(values) for reward in group.rewards)
