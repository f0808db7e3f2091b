"""From `[[reward]]` and `[scoring]` to the reward stage, in this process or another.

In: the settings and which rewards the rows name. Out: a `ScoringRecipe`, which is plain data and travels, and the stage
that is built from it. Imports no torch, so that reward workers start quickly.
"""

import inspect
import math
import os
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from podium.errors import InputError
from podium.records import Group, Row
from podium.reward.isolation import RewardWorkers
from podium.reward.scoring.stage import NamedReward, Scoring, bound_reward, declared_range
from podium.settings.lookup import choices, find
from podium.settings.sections import Reward
from podium.settings.sections import Scoring as ScoringSection
from podium.settings.tables import Settings

DEFAULT_WORKER_MEMORY_MB = 4096
SHOWN = 20
"""Unusable answers that an error message lists."""


class RewardedRows(Protocol):
    """What scoring needs to know of a data stage."""

    @property
    def rows(self) -> Sequence[Row]: ...

    @property
    def row_names(self) -> Sequence[str]:
        """Where each row comes from, for error messages."""
        ...

    @property
    def reward_choices(self) -> Collection[tuple[str, ...]]:
        """Every combination of rewards that a row names."""
        ...


@dataclass(frozen=True)
class ScoringRecipe:
    """All that scoring needs to know, as plain data."""

    rewards: tuple[Reward, ...]
    default: tuple[str, ...]
    """Score the rows that name no reward."""
    section: ScoringSection
    prompts_per_step: int
    penalty: float | None = None
    """Replaces the reward of a rollout that was cut at max_new_tokens; None: its own reward counts."""

    def to_dict(self) -> dict[str, Any]:
        plain = {"default": list(self.default), "prompts_per_step": self.prompts_per_step, "penalty": self.penalty}
        rewards = [reward.model_dump(mode="json", exclude_none=True) for reward in self.rewards]
        return plain | {"rewards": rewards, "section": self.section.model_dump(mode="json", exclude_none=True)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "ScoringRecipe":
        rewards = tuple(Reward.model_validate(table).resolved("reward", "reward") for table in plain["rewards"])
        section = ScoringSection.model_validate(plain["section"])
        return cls(rewards, tuple(plain["default"]), section, plain["prompts_per_step"], plain["penalty"])

    def build(self, elsewhere: Callable[[Group], Coroutine[Any, Any, Group]] | None = None) -> Scoring:
        """`elsewhere` scores in place of what is built, which then starts no process."""
        given, by_name = self.section, {choice.name: named_reward(choice) for choice in self.rewards}
        limits = (self.prompts_per_step, given.max_failed_share, self.penalty)
        return Scoring(by_name, self.default, *limits, self._workers(by_name), elsewhere)

    def needs_processes(self) -> bool:
        return any(choice.timeout_s is not None for choice in self.rewards)

    def _workers(self, by_name: dict[str, NamedReward]) -> RewardWorkers | None:
        slow = [each for each in by_name.values() if each.timeout_s is not None]
        memory_mb = self.section.worker_memory_mb or DEFAULT_WORKER_MEMORY_MB
        for each in slow:
            if (wanted := each.options.get("memory_mb", 0)) > memory_mb and each.name in choices("reward"):
                raise InputError(
                    f"reward {each.name!r}: memory_mb = {wanted} has no effect, its process may take {memory_mb}; "
                    "raise scoring.worker_memory_mb"
                )
        recipes = [{"name": each.name, "options": each.options} for each in slow]
        return RewardWorkers(recipes, len(os.sched_getaffinity(0)), memory_mb) if recipes else None


def check_rewards(settings: Settings) -> None:
    """Rewards that cannot run here are an error before the model is loaded."""
    for choice in settings.reward:
        named_reward(choice)


def named_reward(choice: Reward) -> NamedReward:
    found = find("reward", choice.name)
    if choice.timeout_s is not None and choice.name.startswith("__main__:"):
        raise InputError(
            f"reward.name = {choice.name!r}: a worker process cannot import the script that was started; put the "
            f"reward into a file of its own and name it 'file.py:{choice.name.removeprefix('__main__:')}'"
        )
    if inspect.isclass(found) and not hasattr(found, "registered_name"):
        raise InputError(f'reward.name = {choice.name!r} is a class; put @podium.register_reward("name") on it')
    if refuse := getattr(found, "refuse", None):
        refuse(choice.timeout_s, **choice.options)
    function = bound_reward(found, choice.options)
    if choice.format == "gate" and math.isinf(declared_range(function)[1]):
        raise InputError(
            f"reward {choice.name!r} with format = 'gate': it does not declare its highest value, so when it lets the "
            "others through is not known; put podium.declare_range(lowest, highest) on it"
        )
    plain = {key: value for key, value in choice.model_dump(mode="json").items() if key in choice.options}
    weight = 1.0 if choice.weight is None else choice.weight
    return NamedReward(choice.name, function, weight, choice.timeout_s, plain, choice.format)


def build_scoring(settings: Settings, data: Sequence[RewardedRows], *, all_rows: bool = True) -> Scoring:
    """The settings' rewards, and those that rows name; an unknown name is an error now, not at the first rollout.

    `all_rows`: `data` is all that the run has, so a reward that scores none of it has no effect and is an error.
    """
    scoring = scoring_recipe(settings, data, all_rows=all_rows).build()
    check_scoring(scoring, data)
    return scoring


def scoring_recipe(settings: Settings, data: Sequence[RewardedRows], *, all_rows: bool = True) -> ScoringRecipe:
    chosen: dict[str, Reward] = {}
    for choice in settings.reward:
        if choice.name in chosen:
            raise InputError(f"reward: {choice.name!r} is given twice; give each reward one table")
        chosen[choice.name] = choice
    default = [choice.name for choice in settings.reward if choice.format is None]
    of_rows = {names for source in data for names in source.reward_choices}
    if settings.environment is not None and not default and () in of_rows:
        default, chosen["environment"] = ["environment"], Reward(name="environment").resolved("reward", "reward")
    named_by_rows = {name for names in of_rows for name in names}
    for name in sorted(named_by_rows - chosen.keys()):  # a reward without a table of its own, with its defaults
        where = f"{_first_row(data, name)}: reward {name!r}"
        if name not in choices("reward") and ":" not in name:
            raise InputError(f"{where} is not known; known: {', '.join(choices('reward'))}, or a 'module:object'")
        chosen[name] = Reward(name=name).resolved("reward", where)
    limits = (settings.run.prompts_per_step, settings.filter.penalty)
    recipe = ScoringRecipe(tuple(chosen.values()), tuple(default), settings.scoring, *limits)
    unused = [] if () in of_rows else sorted(set(default) - named_by_rows)
    if all_rows and unused:
        raise InputError(f"reward {unused[0]!r} has no effect: every row names its own reward; remove one or the other")
    if all_rows and recipe.section.worker_memory_mb is not None and not recipe.needs_processes():
        raise InputError(
            "scoring.worker_memory_mb has no effect: no reward of this run needs a worker process; remove it"
        )
    return recipe


def _first_row(data: Sequence[RewardedRows], name: str) -> str:
    """The first row that names the reward, for people."""
    rows = ((where, row) for source in data for where, row in zip(source.row_names, source.rows, strict=True))
    return next(where for where, row in rows if name in row.reward)


def check_scoring(scoring: Scoring, data: Sequence[RewardedRows]) -> None:
    """Every row has a reward for its answer, and each of its rewards can use that answer."""
    for names in {names for source in data for names in source.reward_choices}:
        rewards = scoring.rewards_of(names)
        if any(reward.format is None for reward in rewards):
            continue
        if names:
            where = f"{_first_row(data, names[0])} names format rewards only"
            raise InputError(f"{where}, {', '.join(names)}; name a reward for its answer too")
        if rewards:
            only = rewards[0].name
            raise InputError(f"the only reward is for the format, {only!r}; add a [[reward]] table without 'format'")
        raise InputError("no reward: add a [[reward]] table, or name one in each row")
    complaints = []
    for source in data:
        for where, row in zip(source.row_names, source.rows, strict=True):
            for reward in scoring.rewards_of(row.reward):
                try:
                    getattr(reward.function, "check_answer", lambda row: None)(row)
                except (ValueError, TypeError) as error:
                    complaints.append(f"  {where}, reward {reward.name!r}: {error}")
    if complaints:
        more = f"\n  and {len(complaints) - SHOWN} more" if len(complaints) > SHOWN else ""
        listing = "\n".join(complaints[:SHOWN])
        raise InputError(f"{len(complaints)} answers cannot be used; mend or remove the rows:\n{listing}{more}")


def check_retirement(settings: Settings, scoring: Scoring, data: RewardedRows) -> None:
    """Rows can only be retired where it is known which rollouts are correct."""
    rate = settings.filter.retire_pass_rate
    unknown = sorted({name for names in data.reward_choices for name in scoring.without_highest(names)})
    if rate is not None and unknown:
        raise InputError(
            f"filter.retire_pass_rate = {rate}: reward {unknown[0]!r} does not declare its highest value, so no "
            "rollout is known to be correct; put podium.declare_range(lowest, highest) on it, or remove the setting"
        )
