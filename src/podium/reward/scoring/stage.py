"""Stage 3: every reward of a group's prompt, weighted and summed, as soon as the group arrives.

Rewards run in worker processes while generation goes on; those that are quick and harmless run in this process. A
reward promises one finite number per rollout, within its declared range, or None to abstain. A reward that raises,
exceeds its time limit or ends its process abstains and is counted; a failure never becomes 0. A value that breaks the
contract stops the run. The weighted task rewards are summed. A format reward that gates keeps a sum above 0 only where
it has its highest value; one that adds is added after that. A rollout is correct if it has the highest number that its
rewards allow. For rollouts cut at `max_new_tokens`, `non_stop_penalty` replaces the number.
"""

import asyncio
import inspect
import math
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from podium.errors import RewardContractError, RewardFailedError
from podium.records import Group, Prompt, Rollout
from podium.reward.scoring.verifiers import counting
from podium.stages import RewardFunction

if TYPE_CHECKING:
    from podium.reward.isolation import RewardWorkers

MAX_REWARD = 1e30
"""Larger rewards overflow in the differences and squares of advantages, and in float32."""
CLOSE = 1e-8
"""Tolerance below the highest value that still counts as the highest, times the width of the range if that is below
1."""
REWARDS = Path(__file__).parents[1]
"""Folder of the rewards that come with Podium."""
Style = Literal["each", "together", "batched"]
"""How a reward is called: on each rollout in turn, on all at the same time (a coroutine), or once per group."""


@dataclass(frozen=True)
class Failed:
    """A call without a value: it raised, exceeded its time limit or ended its process. The rollout abstains."""

    reason: str


Outcome = float | None | Failed


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


@dataclass(frozen=True)
class Scoring:
    """Scores groups with the rewards that their rows name. `close` ends the workers."""

    by_name: Mapping[str, NamedReward]
    """Every reward that a row may name. Format rewards score every row."""
    default: Sequence[str]
    """Score the rows that name no reward."""
    prompts_per_step: int
    max_failed_share: float = 0.1
    non_stop_penalty: float | None = None
    workers: "RewardWorkers | None" = None
    """Needed if a reward has a time limit."""
    elsewhere: Callable[[Group], Coroutine[Any, Any, Group]] | None = None
    """Scores each group in another process, which calls its own `Scoring.score`."""

    def for_evaluation(self) -> "Scoring":
        """The same rewards; the share of failed calls is taken over the whole evaluation, which may be small."""
        return replace(self, prompts_per_step=sys.maxsize)

    def close(self) -> None:
        """Ends the worker processes."""
        if self.workers is not None:
            self.workers.close()

    def without_highest(self, names: Sequence[str]) -> list[str]:
        """Those of a row's rewards that do not tell what is correct; `names` may be empty, as in a row."""
        return [reward.name for reward in self.rewards_of(names) if math.isinf(reward.highest_share)]

    def rewards_of(self, names: Sequence[str]) -> list[NamedReward]:
        """The rewards of a row with these names, which may be none: each reward once, format rewards last."""
        task = [self.by_name[name] for name in names or self.default]
        formats = [reward for reward in self.by_name.values() if reward.format is not None]
        return list({reward.name: reward for reward in [*task, *formats]}.values())

    async def score_each(self, groups: AsyncIterator[Group], after: Sequence[Group] = ()) -> AsyncIterator[Group]:
        """Yields groups in the order of arrival; a group is scored while later ones are still being generated.

        The last group of a step is held back until the step's share of failed calls is known to be small enough. For a
        smaller last step the share is checked before the generator ends, and so before the step trains. Groups that
        refill a step come `after` others, which count in the share: a few groups alone would say little.
        """
        pending: deque[asyncio.Task[Group]] = deque()
        step = list(after)

        def checked(group: Group) -> Group:
            step.append(group)
            if len(step) >= self.prompts_per_step:
                self._check_share(step)
                if not after:  # any group of a refill may be the one that completes the step
                    step.clear()
            return group

        async for group in groups:
            task = asyncio.create_task((self.elsewhere or self.score)(group))
            # Looks at the exception, which asyncio would print otherwise.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            pending.append(task)
            while pending and pending[0].done():
                yield checked(pending.popleft().result())
        while pending:
            yield checked(await pending.popleft())
        self._check_share(step)

    async def score(self, group: Group) -> Group:
        """The group with its rewards, their parts and the failures; a group without rollouts stays as it is."""
        if not group.rollouts:
            return group
        started = time.monotonic()
        rewards = self.rewards_of(group.prompt.reward)
        with counting() as counts:
            columns = await asyncio.gather(*(self.outcomes(reward, group) for reward in rewards))
        scored = self._with_outcomes(group, rewards, columns)
        return replace(scored, reward_counts=dict(counts), scoring_s=time.monotonic() - started)

    def unscored(self, group: Group, reason: str) -> Group:
        """A group that could not be scored: every reward abstains, and the share of failed calls counts it."""
        rewards = self.rewards_of(group.prompt.reward)
        return self._with_outcomes(group, rewards, [[Failed(reason)] * len(group.rollouts)] * len(rewards))

    async def outcomes(self, reward: NamedReward, group: Group) -> list[Outcome]:
        """The outcome of one reward alone for each rollout; a breach of contract is raised. An episode whose
        environment failed has none."""
        if any(rollout.failure for rollout in group.rollouts):
            good = tuple(rollout for rollout in group.rollouts if not rollout.failure)
            found = iter(await self.outcomes(reward, replace(group, rollouts=good)) if good else ())
            return [Failed(each.failure) if each.failure else next(found) for each in group.rollouts]
        style = style_of(reward.function)
        if reward.timeout_s is not None:
            assert self.workers is not None
            sent = await self.workers.score(reward.name, style, reward.timeout_s, group)
            check = partial(check_value, reward.name, reward.function, prompt=group.prompt)
            return [each if isinstance(each, Failed) else check(each) for each in sent]
        outcomes: dict[int, Outcome] = {}
        rollouts = dict(enumerate(group.rollouts))
        await call_reward(reward.name, reward.function, style, lambda: group.prompt, rollouts, outcomes.__setitem__)
        return [outcomes[index] for index in rollouts]

    def _with_outcomes(
        self, group: Group, rewards: Sequence[NamedReward], columns: Sequence[Sequence[Outcome]]
    ) -> Group:
        """`columns`: for each reward its outcomes, one per rollout."""
        failures: Counter[str] = Counter()
        parts: list[dict[str, float | None]] = [{} for _ in group.rollouts]
        for reward, column in zip(rewards, columns, strict=True):
            for part, outcome in zip(parts, column, strict=True):
                if isinstance(outcome, Failed):
                    failures[f"{reward.name}: {outcome.reason}"] += 1
                part[reward.name] = None if isinstance(outcome, Failed) else outcome
        scored = replace(
            group,
            rewards=tuple(total(rewards, part) for part in parts),
            reward_parts=tuple(parts),
            correct=tuple(is_correct(rewards, part) for part in parts),
            reward_failures=dict(failures),
        )
        return scored if self.non_stop_penalty is None else _penalised(scored, self.non_stop_penalty)

    def _check_share(self, step: Sequence[Group]) -> None:
        """Stops the run if too many calls of a step gave no number."""
        if reason := too_many_failed(step, self.max_failed_share):
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
    rewards, correct = list(group.rewards), list(group.correct)
    for place, rollout in enumerate(group.rollouts):
        if rollout.finish_reason == "length":
            rewards[place] = None if rewards[place] is None else penalty
            correct[place] = None if correct[place] is None else False
    return replace(group, rewards=tuple(rewards), correct=tuple(correct))


# ---- one number from several rewards


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


# ---- what a reward declares and returns


def declared_range(function: Any) -> tuple[float, float]:
    """The declared range; without a declaration, all finite numbers."""
    return getattr(function, "min_value", -math.inf), getattr(function, "max_value", math.inf)


def style_of(function: Any) -> Style:
    """A reward whose second argument is called `rollouts` scores whole groups. An object may have its own `style`."""
    if style := getattr(function, "style", None):
        return style
    try:
        arguments = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some built-in functions have no signature
        arguments = []
    if arguments[1:2] == ["rollouts"]:
        return "batched"
    return "together" if inspect.iscoroutinefunction(function) else "each"


def check_value(name: str, function: Any, value: Any, prompt: Prompt) -> float | None:
    """The value as a float; `RewardContractError` if the contract does not allow it."""
    if value is None:
        return None
    where = _where(name, prompt)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RewardContractError(
            f"{where} returned {_shown(value)} of type {type(value).__name__}; return a float, or None to abstain"
        )
    try:
        number = float(value)  # from here on a plain float, whatever class it came from
    except OverflowError:  # an integer that no float can hold
        number = math.inf
    if not math.isfinite(number):
        text = "a huge integer" if isinstance(value, int) and value.bit_length() > 4096 else value
        raise RewardContractError(f"{where} returned {text}; return a finite number, or None to abstain")
    if abs(number) > MAX_REWARD:
        raise RewardContractError(
            f"{where} returned {number}; return a number from -{MAX_REWARD:g} to {MAX_REWARD:g}, or None to abstain"
        )
    low, high = declared_range(function)
    if not low - 1e-9 <= number <= high + 1e-9:
        raise RewardContractError(f"{where} returned {number}, outside its declared range [{low}, {high}]")
    return number


def check_values(name: str, function: Any, values: Any, count: int, prompt: Prompt) -> list[float | None]:
    """What a batched reward returned: a list with one value per rollout."""
    where = _where(name, prompt)
    if not isinstance(values, (list, tuple)):
        raise RewardContractError(
            f"{where} returned {_shown(values)} of type {type(values).__name__}; "
            "a reward of a whole group returns a list, one value per rollout"
        )
    values = list(values)  # a subclass of list may report a wrong length
    if len(values) != count:
        raise RewardContractError(f"{where} returned {len(values)} values for {count} rollouts")
    return [check_value(name, function, value, prompt) for value in values]


def _where(name: str, prompt: Prompt) -> str:
    return f"reward {name!r} on prompt {prompt.ordinal} ({prompt.source or 'data'})"


def _shown(value: Any) -> str:
    """The value as text; the `repr` of a broken reward's value may raise."""
    try:
        return f"{value!r:.80}"
    except Exception:
        return "something without a text"


# ---- calls


async def call_reward(
    name: str,
    function: Any,
    style: Style,
    prompt: Callable[[], Prompt],
    rollouts: Mapping[int, Rollout],
    report: Callable[[int, Outcome], None],
    limit_s: float | None = None,
) -> None:
    """Reports each rollout's outcome as soon as it is known; a breach of contract is raised.

    `prompt` returns the prompt, in a worker a new object per call, so that a reward that changes it affects no other
    call. `limit_s` ends each coroutine that waits too long; only killing the process ends other rewards.
    """
    if style == "batched":
        given = prompt()
        values = await _returned(function, given, tuple(rollouts.values()))
        is_failed = isinstance(values, Failed)
        outcomes = [values] * len(rollouts) if is_failed else check_values(name, function, values, len(rollouts), given)
        for index, outcome in zip(rollouts, outcomes, strict=True):
            report(index, outcome)
        return

    async def call(index: int, rollout: Rollout) -> None:
        given = prompt()
        try:
            async with asyncio.timeout(limit_s):
                value = await _returned(function, given, rollout)
        except TimeoutError:
            value = late(limit_s)
        report(index, value if isinstance(value, Failed) else check_value(name, function, value, given))

    if style == "together":
        await asyncio.gather(*(call(index, rollout) for index, rollout in rollouts.items()))
        return
    for index, rollout in rollouts.items():
        await call(index, rollout)


def late(limit_s: float | None) -> Failed:
    return Failed(f"timeout after {limit_s:g} s")


async def _returned(function: Any, prompt: Prompt, rollouts: Any) -> Any:
    """What the reward returns, awaited if it is a coroutine, or how it failed."""
    try:
        value = function(prompt, rollouts)
        return await value if inspect.isawaitable(value) else value
    except (KeyboardInterrupt, asyncio.CancelledError, RewardContractError):
        raise
    except BaseException as error:  # SystemExit too: a reward must not end the run
        return Failed(_described(error))


def _described(error: BaseException) -> str:
    """The error's class, the place in the reward's file, and the error's text, which may be long."""
    text = type(error).__name__
    with suppress(Exception):  # the traceback may be unreadable
        text += _place(error.__traceback__)
    with suppress(Exception):  # `str` may raise
        text += f": {error}"
    return text


def _place(trace: TracebackType | None) -> str:
    """The last line in the file that the reward starts in; empty for Podium's own rewards."""
    lines = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(trace)]
    own = [(file, number) for file, number in lines if file != __file__]
    if not own or REWARDS in Path(own[0][0]).parents:
        return ""
    file, number = [line for line in own if line[0] == own[0][0]][-1]
    return f" at {Path(file).name}:{number}"


# ---- classes

MARKS = ("min_value", "max_value", "runs_inline", "refuse", "gold", "check_answer")
"""Attributes that decorators set on a reward."""


class Normalised:
    """A registered class with its options, as a reward function with values in [0, 1].

    The keyword-only arguments of the class's constructor are the options. `__call__(prompt, rollout)` scores one
    rollout (`rollouts`: a whole group); it may be a coroutine.
    """

    def __init__(self, cls: Any, options: Mapping[str, Any]) -> None:
        self._cls, self._options = cls, options
        _copy_marks(cls, self)
        self.min_value, self.max_value = 0.0, 1.0
        self.style: Style = style_of(partial(cls.__call__, None))

    @cached_property
    def instance(self) -> Any:
        """Created on first use, which is in the process that forks the workers if the reward runs in workers."""
        return self._cls(**self._options)

    async def __call__(self, prompt: Prompt, rollout: Any) -> Any:
        """`rollout` is a tuple of rollouts if the class scores whole groups."""
        value = self.instance(prompt, rollout)
        value = await value if inspect.isawaitable(value) else value
        name = self._cls.registered_name
        if self.style == "batched":
            return [self._share(each) for each in check_values(name, self._cls, value, len(rollout), prompt)]
        return self._share(check_value(name, self._cls, value, prompt))

    def _share(self, value: float | None) -> float | None:
        """The value's position in the range of the class."""
        low, high = self._cls.min_value, self._cls.max_value
        return None if value is None else min(1.0, max(0.0, (value - low) / (high - low)))


def bound_reward(found: Any, options: Mapping[str, Any]) -> Any:
    """A reward, function or class, with its options bound; it keeps its marks."""
    if hasattr(found, "registered_name"):
        return Normalised(found, options)
    return _copy_marks(found, partial(found, **options))


def _copy_marks(source: Any, target: Any) -> Any:
    for name in MARKS:
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))
    return target
