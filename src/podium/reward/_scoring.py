"""Stage 3: every reward of a group's prompt, weighed and summed, as soon as the group arrives.

Rewards run in worker processes, beside generation; those that are quick and harmless run here. A reward that raises,
takes too long or takes its process down abstains and is counted; it never becomes 0. A value that breaks the contract
stops the run. How values become one number is in `_combine.py`. Last of all, `non_stop_penalty` takes the place of that
number for a rollout that was cut at its longest.
"""

import asyncio
import copy
import math
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from podium.errors import RewardFailedError
from podium.records import Group
from podium.reward._calls import call_reward
from podium.reward._combine import NamedReward, is_correct, total
from podium.reward._contract import Style, check_value, style_of
from podium.reward._counts import counting
from podium.reward._messages import EncodedGroup, Failed, Outcome, encode_group
from podium.reward._workers import RewardWorkers


class Scoring:
    """`default` scores the rows that name no reward; `by_name` holds every reward that a row may name, or that `remap`
    puts in the place of such a name. Format rewards score every row.

    `workers` is needed where a reward has a time limit; `close` ends them. `elsewhere` takes the place of `score` where
    other processes score.
    """

    def __init__(
        self,
        by_name: Mapping[str, NamedReward],
        default: Sequence[str],
        prompts_per_step: int,
        max_failed_share: float = 0.1,
        non_stop_penalty: float | None = None,
        workers: RewardWorkers | None = None,
        scale: float = 1.0,
        remap: Mapping[str, str] | None = None,
        elsewhere: Callable[[Group], Coroutine[Any, Any, Group]] | None = None,
    ) -> None:
        self._by_name, self._default, self._workers = by_name, default, workers
        self._prompts_per_step, self._max_failed_share = prompts_per_step, max_failed_share
        self._non_stop_penalty, self._scale, self._remap = non_stop_penalty, scale, remap or {}
        self._score = elsewhere or self.score
        self._styles: dict[str, Style] = {name: style_of(reward.function) for name, reward in by_name.items()}

    def for_evaluation(self, max_failed_share: float | None = None) -> "Scoring":
        """The same rewards; the share of failed ones, by default as many as in a run, is taken over a whole evaluation,
        which may be small."""
        share = self._max_failed_share if max_failed_share is None else max_failed_share
        limits = (sys.maxsize, share, self._non_stop_penalty)
        return Scoring(self._by_name, self._default, *limits, self._workers, self._scale, self._remap, self._score)

    def scored_by(self, score: Callable[[Group], Coroutine[Any, Any, Group]]) -> "Scoring":
        """The same stage with each group scored elsewhere, by `Scoring.score` there."""
        other = copy.copy(self)
        other._score = score
        return other

    def close(self) -> None:
        """Ends the worker processes."""
        if self._workers is not None:
            self._workers.close()

    def without_highest(self, names: Sequence[str]) -> list[str]:
        """Those of a row's rewards for which "correct" is not known; `names` may be empty, as in a row."""
        return [reward.name for reward in self.rewards_of(names) if math.isinf(reward.highest_share)]

    def rewards_of(self, names: Sequence[str]) -> list[NamedReward]:
        """What scores a row that names these, or none: each reward once, format rewards last."""
        task = [self._by_name[name] for name in [self._remap.get(name, name) for name in names] or self._default]
        formats = [reward for reward in self._by_name.values() if reward.format is not None]
        return list({reward.name: reward for reward in [*task, *formats]}.values())

    async def score_each(self, groups: AsyncIterator[Group], after: Sequence[Group] = ()) -> AsyncIterator[Group]:
        """Yields in the order of arrival; a group is scored while later ones are still being written.

        The last group of a step is held back until the step's share of failed rewards is known to be small; that of
        a last, smaller step is known before the generator ends, and so before the step trains. Groups that refill a
        step come `after` others, which count in its share: a few alone would say little.
        """
        pending: deque[asyncio.Task[Group]] = deque()
        step = list(after)
        async for group in groups:
            task = asyncio.create_task(self._score(group))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # else each breach prints itself
            pending.append(task)
            while pending and pending[0].done():
                yield self._checked(pending.popleft().result(), step, bool(after))
        while pending:
            yield self._checked(await pending.popleft(), step, bool(after))
        self._check_share(step)

    async def score(self, group: Group) -> Group:
        """The group with rewards, their parts and what failed; one without rollouts has nothing to score."""
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
            rewards=tuple(total(rewards, part, self._scale) for part in parts),
            reward_parts=tuple(parts),
            correct=tuple(is_correct(rewards, part) for part in parts),
            reward_failures=dict(failures),
            reward_counts=dict(counts),
            scoring_s=time.monotonic() - started,
        )
        return scored if self._non_stop_penalty is None else _penalised(scored, self._non_stop_penalty)

    def unscored(self, group: Group, reason: str) -> Group:
        """A group that nobody could score: every reward abstains, and the share of failed ones counts it."""
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
        """What one reward alone makes of each rollout; a breach of contract is raised."""
        return await self._outcomes(reward, group, None if reward.timeout_s is None else encode_group(group))

    async def _outcomes(self, reward: NamedReward, group: Group, encoded: EncodedGroup | None) -> list[Outcome]:
        """One a rollout."""
        style = self._styles[reward.name]
        if reward.timeout_s is not None:
            assert self._workers is not None
            assert encoded is not None
            return await self._workers.score(reward.name, style, reward.timeout_s, encoded)
        outcomes: dict[int, Outcome] = {}
        rollouts = dict(enumerate(group.rollouts))
        await call_reward(reward.name, reward.function, style, lambda: group.prompt, rollouts, outcomes.__setitem__)
        return [outcomes[index] for index in rollouts]

    def _checked(self, group: Group, step: list[Group], is_refill: bool) -> Group:
        """The group, once the step that it completes is known to be good; `step` gathers its groups.

        Any group of a refill may be the one that completes a step.
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
    """What to tell if more of the groups' reward calls gave no number than may; else nothing."""
    values = [value for each in groups for part in each.reward_parts for value in part.values()]
    failed = sum(value is None for value in values)
    if failed <= max_failed_share * len(values):
        return ""
    failures: Counter[str] = sum((Counter(each.reward_failures) for each in groups), Counter())
    reasons = "; ".join(f"{reason} (×{count})" for reason, count in failures.most_common(3))
    return (
        f"{failed} of {len(values)} reward calls gave no number, more than scoring.max_failed_share = "
        f"{max_failed_share}: {reasons or 'they abstained'}. Mend the reward (`podium check SETTINGS --rewards` shows "
        "what it makes of right and wrong answers), or raise that share"
    )


def _penalised(group: Group, penalty: float) -> Group:
    """Cut rollouts get the penalty for their reward and are not correct, however high it is.

    What is not known stays so: a rollout without a reward, and `correct` where no highest reward is declared.
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
