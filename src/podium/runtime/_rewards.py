"""From tables of rewards to what scores with them, here or in another process. Imports no torch, so that one starts
quickly."""

import inspect
import math
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from podium.errors import InputError
from podium.lookup import choices, find
from podium.records import Group
from podium.reward._classes import bound_reward
from podium.reward._combine import NamedReward
from podium.reward._contract import declared_range
from podium.reward._scoring import Scoring
from podium.reward._workers import RewardWorkers
from podium.sections import Reward
from podium.sections import Scoring as ScoringSection

DEFAULT_WORKER_MEMORY_MB = 4096


@dataclass(frozen=True)
class ScoringRecipe:
    """All that scoring needs to know, as plain data."""

    rewards: tuple[Reward, ...]
    default: tuple[str, ...]
    """Score the rows that name no reward."""
    section: ScoringSection
    prompts_per_step: int

    def build(self, elsewhere: Callable[[Group], Coroutine[Any, Any, Group]] | None = None) -> Scoring:
        """`elsewhere` scores in place of what is built, which then starts no process."""
        given, by_name = self.section, {choice.name: named_reward(choice) for choice in self.rewards}
        limits = (self.prompts_per_step, given.max_failed_share, given.non_stop_penalty)
        workers = self._workers(by_name)
        return Scoring(by_name, self.default, *limits, workers, given.scale, given.remap, elsewhere)

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
        size = self.section.workers or len(os.sched_getaffinity(0))
        return RewardWorkers(recipes, size, memory_mb) if recipes else None


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
