"""Stage 3: every reward of a group's prompt, weighed and summed, as soon as the group arrives.

A reward that raises abstains and is counted; it never becomes 0. A value that breaks the contract stops the run.
Last of all, `non_stop_penalty` takes the place of the sum for a rollout that was cut at its longest.
"""

import asyncio
import inspect
import sys
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace

from podium.errors import RewardFailedError
from podium.records import Group, Prompt, Rollout
from podium.reward._contract import check_value, declared_range
from podium.stages import RewardFunction


@dataclass(frozen=True)
class NamedReward:
    """A reward as the settings name it, its options bound."""

    name: str
    function: RewardFunction
    weight: float = 1.0


class Scoring:
    """`default` scores the rows that name no reward; `by_name` holds every reward that a row may name."""

    def __init__(
        self,
        by_name: Mapping[str, NamedReward],
        default: Sequence[str],
        prompts_per_step: int,
        max_failed_share: float = 0.1,
        non_stop_penalty: float | None = None,
    ) -> None:
        self._by_name, self._default = by_name, default
        self._prompts_per_step, self._max_failed_share = prompts_per_step, max_failed_share
        self._non_stop_penalty = non_stop_penalty

    def for_evaluation(self) -> "Scoring":
        """The same rewards; the share of failed ones is taken over a whole evaluation, which may be small."""
        return Scoring(self._by_name, self._default, sys.maxsize, self._max_failed_share, self._non_stop_penalty)

    def without_highest(self, names: Sequence[str]) -> list[str]:
        """Those of a row's rewards for which "correct" is not known; `names` may be empty, as in a row."""
        return [name for name in names or self._default if _highest(self._by_name[name]) == float("inf")]

    async def score_each(self, groups: AsyncIterator[Group], after: Sequence[Group] = ()) -> AsyncIterator[Group]:
        """Yields in the order of arrival; a group is scored while later ones are still being written.

        The last group of a step is held back until the step's share of failed rewards is known to be small; that of
        a last, smaller step is known before the generator ends, and so before the step trains. Groups that refill a
        step come `after` others, which count in its share: a few alone would say little.
        """
        pending: deque[asyncio.Task[Group]] = deque()
        step = list(after)
        async for group in groups:
            task = asyncio.create_task(self.score(group))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # else each breach prints itself
            pending.append(task)
            while pending and pending[0].done():
                yield self._checked(pending.popleft().result(), step, bool(after))
        while pending:
            yield self._checked(await pending.popleft(), step, bool(after))
        self._check_share(step)

    async def score(self, group: Group) -> Group:
        """The group with rewards, their parts and what failed."""
        started = time.monotonic()
        rewards = [self._by_name[name] for name in group.prompt.reward or self._default]
        failures: Counter[str] = Counter()
        calls = (self._score_one(rewards, group.prompt, rollout, failures) for rollout in group.rollouts)
        parts = await asyncio.gather(*calls)
        totals = [_total(rewards, part) for part in parts]
        highest = sum(map(_highest, rewards))
        scored = replace(
            group,
            rewards=tuple(totals),
            reward_parts=tuple(parts),
            correct=tuple(_is_correct(total, highest) for total in totals),
            reward_failures=dict(failures),
            scoring_s=time.monotonic() - started,
        )
        return scored if self._non_stop_penalty is None else _penalised(scored, self._non_stop_penalty)

    async def _score_one(
        self, rewards: Sequence[NamedReward], prompt: Prompt, rollout: Rollout, failures: Counter[str]
    ) -> dict[str, float | None]:
        values: dict[str, float | None] = {}
        for reward in rewards:
            try:
                value = reward.function(prompt, rollout)
                if inspect.isawaitable(value):
                    value = await value
            except (KeyboardInterrupt, asyncio.CancelledError):
                raise
            except BaseException as error:  # SystemExit too: a reward does not end the run
                failures[f"{reward.name}: {type(error).__name__}: {error}"] += 1
                value = None
            values[reward.name] = check_value(reward.name, reward.function, value, prompt)
        return values

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
        values = [value for each in step for part in each.reward_parts for value in part.values()]
        failed = sum(value is None for value in values)
        if failed > self._max_failed_share * len(values):
            failures: Counter[str] = sum((Counter(each.reward_failures) for each in step), Counter())
            reasons = "; ".join(f"{reason} (×{count})" for reason, count in failures.most_common(3))
            raise RewardFailedError(
                f"{failed} of {len(values)} reward calls gave no number, more than "
                f"scoring.max_failed_share = {self._max_failed_share}: {reasons or 'they abstained'}"
            )


def _highest(reward: NamedReward) -> float:
    """Its largest share in the sum; infinite where it declares no range."""
    if reward.weight == 0:  # 0 · ∞ is no number
        return 0.0
    return reward.weight * declared_range(reward.function)[reward.weight >= 0]


def _total(rewards: Sequence[NamedReward], part: Mapping[str, float | None]) -> float | None:
    """Weighted sum; None if any gave no number: a rollout is never judged by a part of its rewards."""
    values = [part[reward.name] for reward in rewards]
    if any(value is None for value in values):
        return None
    return sum(reward.weight * value for reward, value in zip(rewards, values, strict=True) if value is not None)


def _is_correct(total: float | None, highest: float) -> bool | None:
    """Whether the reward is the highest possible; unknown where a reward declares no range."""
    if total is None or highest == float("inf"):
        return None
    return total >= highest - 1e-8


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
