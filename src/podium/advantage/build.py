"""From `[advantage]` to the advantage stage: groups in, groups with advantages out."""

from collections.abc import Callable, Sequence
from functools import partial

from podium.advantage._assign import assign_advantages, check_advantages
from podium.records import Group
from podium.settings.contracts import is_users, user_code
from podium.settings.lookup import find
from podium.settings.tables import Settings
from podium.stages import AdvantageFunction


def build_advantages(settings: Settings) -> Callable[[Sequence[Group]], list[Group]]:
    name = settings.advantage.name
    function = partial(find("advantage", name), **settings.advantage.options)
    if is_users(name):  # checked now: the first group with signal may come much later
        with user_code("advantage.name", name):
            check_advantages(function, [0.0, 1.0, 0.5])
    return partial(_assigned, function, name)


def _assigned(function: AdvantageFunction, name: str, groups: Sequence[Group]) -> list[Group]:
    with user_code("advantage.name", name):
        return assign_advantages(groups, function=function)
