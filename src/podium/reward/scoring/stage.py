"""Stage 3: every reward of a group's prompt, weighted and summed, as soon as the group arrives.

Rewards run in worker processes while generation goes on; those that are quick and harmless run in this process. A
reward that raises, exceeds its time limit or ends its process abstains and is counted; a failure never becomes 0. A
value that breaks the contract stops the run. The weighted task rewards are summed. A format reward that gates keeps a
sum above 0 only where it has its highest value; one that adds is added after that. A rollout is correct if it has the
highest number that its rewards allow. For rollouts cut at `max_new_tokens`, `non_stop_penalty` replaces the number.
"""

import asyncio
import copy
import math
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from podium.errors import RewardContractError, RewardFailedError
from podium.records import Group
from podium.reward.isolation.worker import EncodedGroup, encode_group
from podium.reward.isolation.workers import RewardWorkers
from podium.reward.scoring.contract import (
    MAX_REWARD,
    Failed,
    Outcome,
    call_reward,
    check_value,
    counting,
    declared_range,
    style_of,
)
from podium.stages import RewardFunction

CLOSE = 1e-8
"""Tolerance below the highest value that still counts as the highest, times the width of the range if that is below
1."""


@dataclass(frozen=True)
class NamedReward:
    """A reward by its name in the settings, with its options bound."""

    name: str
    function: RewardFunction
    weight: float = 1.0
    timeout_s: float | None = None
    """Limit of one call in a worker process; None: the reward runs in this process, without a limit."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The bound options as plain data, for the worker."""
    format: Literal["gate", "add"] | None = None
    """None: a task reward."""

    @property
    def highest_share(self) -> float:
        """The most that the reward can add to the sum; infinite if it declares no range."""
        if self.weight == 0 or self.format == "gate":  # 0 · ∞ would be NaN
            return 0.0
        return self.weight * declared_range(self.function)[self.weight >= 0]


def total(rewards: Sequence[NamedReward], part: Mapping[str, float | None]) -> float | None:
    """The rollout's reward; None if any reward gave no number, because some of the rewards alone would mislead."""
    if any(part[reward.name] is None for reward in rewards):
        return None
    task = _weighed([reward for reward in rewards if reward.format is None], part)
    if not gates_hold(rewards, part):
        task = min(0.0, task)  # a negative sum stays: breaking the format must not pay
    number = task + _weighed([reward for reward in rewards if reward.format == "add"], part)
    if not abs(number) <= MAX_REWARD:  # nor NaN
        raise RewardContractError(
            f"the rewards of a rollout add up to {number}, and at most {MAX_REWARD:g} is allowed; lower the "
            "weights of the rewards"
        )
    return number


def is_correct(rewards: Sequence[NamedReward], part: Mapping[str, float | None]) -> bool | None:
    """Whether the reward is the highest possible; None if a reward declares no range or gave no number.

    Each value is compared within its own range, so that a small weight hides no difference.
    """
    if any(part[reward.name] is None for reward in rewards) or any(math.isinf(each.highest_share) for each in rewards):
        return None
    summed = [reward for reward in rewards if reward.weight and reward.format != "gate"]
    return all(has_best(each.function, part[each.name], each.weight) for each in summed) and gates_hold(rewards, part)


def gates_hold(rewards: Sequence[NamedReward], part: Mapping[str, float | None]) -> bool:
    gates = [reward for reward in rewards if reward.format == "gate"]
    return all(has_best(gate.function, part[gate.name]) for gate in gates)


def has_best(function: Any, value: float | None, weight: float = 1.0) -> bool:
    """Whether a reward's value adds the most: its declared maximum, or its minimum if the weight is below 0."""
    low, high = declared_range(function)
    if value is None:
        return False
    allowed = CLOSE * min(1.0, high - low)
    return value >= high - allowed if weight > 0 else value <= low + allowed


def _weighed(rewards: Sequence[NamedReward], part: Mapping[str, float | None]) -> float:
    values = ((reward.weight, part[reward.name]) for reward in rewards)
    return sum((weight * value for weight, value in values if value is not None), 0.0)


class Scoring:
    """Scores groups with the rewards that their rows name.

    `default` scores the rows that name no reward. `by_name` holds every reward that a row may name. Format rewards
    score every row. `workers` is needed if a reward has a time limit; `close` ends them.
    """

    def __init__(
        self,
        by_name: Mapping[str, NamedReward],
        default: Sequence[str],
        prompts_per_step: int,
        max_failed_share: float = 0.1,
        non_stop_penalty: float | None = None,
        workers: RewardWorkers | None = None,
    ) -> None:
        self._by_name, self._default, self._workers = by_name, default, workers
        self._prompts_per_step, self._max_failed_share = prompts_per_step, max_failed_share
        self._non_stop_penalty = non_stop_penalty
        self._score = self.score

    def for_evaluation(self, max_failed_share: float | None = None) -> "Scoring":
        """The same rewards; the share of failed calls is taken over the whole evaluation, which may be small.

        The allowed share is that of the run by default.
        """
        other = copy.copy(self)
        other._prompts_per_step = sys.maxsize
        other._max_failed_share = self._max_failed_share if max_failed_share is None else max_failed_share
        return other

    def scored_by(self, score: Callable[[Group], Coroutine[Any, Any, Group]]) -> "Scoring":
        """The same stage, with each group scored by another process, which calls its own `Scoring.score`."""
        other = copy.copy(self)
        other._score = score
        return other

    def close(self) -> None:
        """Ends the worker processes."""
        if self._workers is not None:
            self._workers.close()

    def without_highest(self, names: Sequence[str]) -> list[str]:
        """Those of a row's rewards that do not tell what is correct; `names` may be empty, as in a row."""
        return [reward.name for reward in self.rewards_of(names) if math.isinf(reward.highest_share)]

    def rewards_of(self, names: Sequence[str]) -> list[NamedReward]:
        """The rewards of a row with these names, which may be none: each reward once, format rewards last."""
        task = [self._by_name[name] for name in names or self._default]
        formats = [reward for reward in self._by_name.values() if reward.format is not None]
        return list({reward.name: reward for reward in [*task, *formats]}.values())

    async def score_each(self, groups: AsyncIterator[Group], after: Sequence[Group] = ()) -> AsyncIterator[Group]:
        """Yields groups in the order of arrival; a group is scored while later ones are still being generated.

        The last group of a step is held back until the step's share of failed calls is known to be small enough. For a
        smaller last step the share is checked before the generator ends, and so before the step trains. Groups that
        refill a step come `after` others, which count in the share: a few groups alone would say little.
        """
        pending: deque[asyncio.Task[Group]] = deque()
        step = list(after)
        async for group in groups:
            task = asyncio.create_task(self._score(group))
            task.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # else asyncio prints each exception
            pending.append(task)
            while pending and pending[0].done():
                yield self._checked(pending.popleft().result(), step, bool(after))
        while pending:
            yield self._checked(await pending.popleft(), step, bool(after))
        self._check_share(step)

    async def score(self, group: Group) -> Group:
        """The group with its rewards, their parts and the failures; a group without rollouts stays as it is."""
        if not group.rollouts:
            return group
        started = time.monotonic()
        rewards = self.rewards_of(group.prompt.reward)
        encoded = encode_group(group) if any(reward.timeout_s is not None for reward in rewards) else None
        with counting() as counts:
            columns = await asyncio.gather(*(self._outcomes(reward, group, encoded) for reward in rewards))
        failures: Counter[str] = Counter()
        parts: list[dict[str, float | None]] = [{} for _ in group.rollouts]
        for reward, column in zip(rewards, columns, strict=True):
            for part, outcome in zip(parts, column, strict=True):
                if isinstance(outcome, Failed):
                    failures[f"{reward.name}: {outcome.reason}"] += 1
                value = None if isinstance(outcome, Failed) else outcome
                part[reward.name] = check_value(reward.name, reward.function, value, group.prompt)
        scored = replace(
            group,
            rewards=tuple(total(rewards, part) for part in parts),
            reward_parts=tuple(parts),
            correct=tuple(is_correct(rewards, part) for part in parts),
            reward_failures=dict(failures),
            reward_counts=dict(counts),
            scoring_s=time.monotonic() - started,
        )
        return scored if self._non_stop_penalty is None else _penalised(scored, self._non_stop_penalty)

    def unscored(self, group: Group, reason: str) -> Group:
        """A group that could not be scored: every reward abstains, and the share of failed calls counts it."""
        names = [reward.name for reward in self.rewards_of(group.prompt.reward)]
        count = len(group.rollouts)
        return replace(
            group,
            rewards=(None,) * count,
            reward_parts=tuple(dict.fromkeys(names) for _ in range(count)),
            correct=(None,) * count,
            reward_failures={f"{name}: {reason}": count for name in names},
        )

    async def try_reward(self, reward: NamedReward, group: Group) -> list[Outcome]:
        """The outcome of one reward alone for each rollout; a breach of contract is raised."""
        return await self._outcomes(reward, group, None if reward.timeout_s is None else encode_group(group))

    async def _outcomes(self, reward: NamedReward, group: Group, encoded: EncodedGroup | None) -> list[Outcome]:
        """One outcome per rollout."""
        style = style_of(reward.function)
        if reward.timeout_s is not None:
            assert self._workers is not None
            assert encoded is not None
            return await self._workers.score(reward.name, style, reward.timeout_s, encoded)
        outcomes: dict[int, Outcome] = {}
        rollouts = dict(enumerate(group.rollouts))
        await call_reward(reward.name, reward.function, style, lambda: group.prompt, rollouts, outcomes.__setitem__)
        return [outcomes[index] for index in rollouts]

    def _checked(self, group: Group, step: list[Group], is_refill: bool) -> Group:
        """The group, after the share of failed calls was checked if the group completes a step.

        `step` collects the groups of the step. Any group of a refill may be the one that completes it.
        """
        step.append(group)
        if len(step) >= self._prompts_per_step:
            self._check_share(step)
            if not is_refill:
                step.clear()
        return group

    def _check_share(self, step: Sequence[Group]) -> None:
        """Stops the run if too many calls of a step gave no number."""
        if reason := too_many_failed(step, self._max_failed_share):
            raise RewardFailedError(reason)


def too_many_failed(groups: Sequence[Group], max_failed_share: float) -> str:
    """The error message if more of the groups' reward calls gave no number than allowed; else an empty text."""
    values = [value for each in groups for part in each.reward_parts for value in part.values()]
    failed = sum(value is None for value in values)
    if failed <= max_failed_share * len(values):
        return ""
    failures: Counter[str] = sum((Counter(each.reward_failures) for each in groups), Counter())
    reasons = "; ".join(f"{reason} (×{count})" for reason, count in failures.most_common(3))
    return (
        f"{failed} of {len(values)} reward calls gave no number, more than scoring.max_failed_share = "
        f"{max_failed_share}: {reasons or 'they abstained'}. Fix the reward (`podium check SETTINGS --rewards` shows "
        "its values for right and wrong answers), or raise that share"
    )


def _penalised(group: Group, penalty: float) -> Group:
    """Cut rollouts get the penalty as their reward and are not correct, however high the penalty is.

    A rollout without a reward keeps none, and `correct` stays None where no highest reward is declared.
    """
    is_cut = [rollout.finish_reason == "length" for rollout in group.rollouts]
    return replace(
        group,
        rewards=tuple(
            penalty if cut and reward is not None else reward for cut, reward in zip(is_cut, group.rewards, strict=True)
        ),
        correct=tuple(
            False if cut and known is not None else known for cut, known in zip(is_cut, group.correct, strict=True)
        ),
    )
