"""Stage 4, from `[advantage]`: groups in, groups with advantages out, each group from its own rewards alone."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from podium.errors import InputError
from podium.records import Group
from podium.settings.contracts import is_users, user_code
from podium.settings.lookup import find
from podium.settings.tables import Settings
from podium.stages import AdvantageFunction


def build_advantages(settings: Settings) -> Callable[[Sequence[Group]], list[Group]]:
    name = settings.advantage.name
    function = partial(find("advantage", name), **settings.advantage.options)
    stage = partial(assign_advantages, function=function)
    if not is_users(name):
        return stage
    with user_code("advantage.name", name):  # checked now: the first group with signal may come much later
        check_advantages(function, [0.0, 1.0, 0.5])
    return user_code("advantage.name", name)(stage)


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
