"""What a reward promises, and how it is called: one finite number per rollout, within its declared range, or None.

A reward is a function of a prompt and a rollout. Decorators declare what its signature cannot say. A reward that loads
something once or keeps state is a class: the keyword-only arguments of its constructor are the options,
`__call__(prompt, rollout)` scores one rollout (`rollouts`: a whole group; both may be coroutines), `min_value` and
`max_value` declare its range, and the run sees its values mapped to [0, 1].
"""

import asyncio
import inspect
import math
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from podium.errors import InputError, RewardContractError
from podium.records import Prompt, Rollout, Row

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)
MAX_REWARD = 1e30
"""Larger rewards overflow in the differences and squares of advantages, and in float32."""
Style = Literal["each", "together", "batched"]
MARKS = ("min_value", "max_value", "runs_inline", "refuse", "gold", "check_answer")
"""Attributes that decorators set on a reward."""


@dataclass(frozen=True)
class Failed:
    """A call without a value: it raised, exceeded its time limit or ended its process. The rollout abstains."""

    reason: str


Outcome = float | None | Failed

# ---- declarations


def _sets(**marks: Any) -> Callable[[F], F]:
    def mark(function: F) -> F:
        for name, value in marks.items():
            setattr(function, name, value)
        return function

    return mark


def declare_range(min_value: float, max_value: float) -> Callable[[F], F]:
    """Decorator: the smallest and the largest value that the reward can return. The largest means "correct"."""
    return _sets(min_value=min_value, max_value=max_value)


def runs_inline(function: F) -> F:
    """Decorator: the reward is quick and harmless on any text, so it needs no worker process and no time limit."""
    return _sets(runs_inline=True)(function)


def refuses(check: Callable[..., None]) -> Callable[[F], F]:
    """Decorator: `check(timeout_s, **options)` runs before the model loads and raises an `InputError` if the reward
    cannot run."""
    return _sets(refuse=check)


def checks_answer(check: Callable[[Row], object]) -> Callable[[F], F]:
    """Decorator: `check` raises an `InputError` if the reward cannot use the answer of a row.

    `check` sees every row before the run starts, so a label that no answer can match is an error and not a score of 0.
    """
    return _sets(check_answer=check)


def reads_answer(read: Callable[[Any], Any]) -> Callable[[F], F]:
    """Decorator: as `checks_answer`, for a reward that reads the answer of a row with `read`."""
    return checks_answer(lambda row: read(row.answer))


def gold_answer(write: Callable[[Prompt], str | None] | str) -> Callable[[F], F]:
    """Decorator for `podium check --rewards`: how a row's answer is written to earn the highest value.

    `write` is a function of the prompt that returns None if the row does not tell, or a text that says why no row can
    tell. Without this decorator the answer's own text is used.
    """
    return _sets(gold=write)


def answer_text(prompt: Prompt) -> str | None:
    """The answer as text, the first of several; None if it is neither a text nor a number."""
    answer = prompt.answer[0] if isinstance(prompt.answer, list) and prompt.answer else prompt.answer
    is_plain = isinstance(answer, (str, int, float)) and not isinstance(answer, bool)
    return str(answer) if is_plain else None


def answer_within(before: str, after: str = "") -> Callable[[Prompt], str | None]:
    """For `gold_answer`: the answer's text between two other texts."""

    def write(prompt: Prompt) -> str | None:
        text = answer_text(prompt)
        return None if text is None else f"{before}{text}{after}"

    return write


def declared_range(function: Any) -> tuple[float, float]:
    """The declared range; without a declaration, all finite numbers."""
    return getattr(function, "min_value", -math.inf), getattr(function, "max_value", math.inf)


def style_of(function: Any) -> Style:
    """How the reward is called: on each rollout in turn, on all at the same time (a coroutine), or once per group.

    A reward whose second argument is called `rollouts` is called once per group. An object may have its own `style`.
    """
    if style := getattr(function, "style", None):
        return style
    try:
        arguments = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some built-in functions have no signature
        arguments = []
    if arguments[1:2] == ["rollouts"]:
        return "batched"
    return "together" if inspect.iscoroutinefunction(function) else "each"


# ---- values


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


# ---- classes


def register_reward(name: str) -> Callable[[C], C]:
    """Class decorator: the class is found as `path.py:name` or `module:name`, and by its own name.

    The class has `min_value` and `max_value`. If it has a `weight`, that is the default of the table's weight.
    """

    def mark(cls: C) -> C:
        low, high = getattr(cls, "min_value", math.nan), getattr(cls, "max_value", math.nan)
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise InputError(
                f"class {cls.__name__}: min_value = {low} and max_value = {high}; a registered reward needs both, as "
                "finite numbers with the smaller first"
            )
        cls.registered_name = name
        return cls

    return mark


class Normalised:
    """A registered class with its options, as a reward function with values in [0, 1]."""

    def __init__(self, cls: Any, options: Mapping[str, Any]) -> None:
        self._cls, self._options = cls, options
        _copy_marks(cls, self)
        self.min_value, self.max_value = 0.0, 1.0
        self.style: Style = style_of(partial(cls.__call__, None))

    @cached_property
    def instance(self) -> Any:
        """Created on first use, which is in the process that forks the workers if the reward runs in workers."""
        return self._cls(**self._options)

    def __call__(self, prompt: Prompt, rollout: Any) -> Any:
        value = self.instance(prompt, rollout)
        return (
            self._later(value, prompt, rollout) if inspect.isawaitable(value) else self._mapped(value, prompt, rollout)
        )

    async def _later(self, value: Any, prompt: Prompt, rollout: Any) -> Any:
        return self._mapped(await value, prompt, rollout)

    def _mapped(self, value: Any, prompt: Prompt, rollout: Any) -> Any:
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


# ---- counts

_current: ContextVar[Counter[str] | None] = ContextVar("counts of the group being scored", default=None)


def count(name: str, amount: float = 1.0) -> None:
    """Adds to the step's metric `reward/NAME`, such as requests, tokens or cost. Has no effect in a worker."""
    counts = _current.get()
    if counts is not None:
        counts[name] += amount  # type: ignore[assignment]


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Collects the counts of the block and of the tasks started in it."""
    counts: Counter[str] = Counter()
    token = _current.set(counts)
    try:
        yield counts
    finally:
        _current.reset(token)


# ---- calls

REWARDS = Path(__file__).parents[1]
"""Folder of the rewards that come with Podium."""


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
        outcomes = await _call_batched(name, function, prompt(), list(rollouts.values()))
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


async def _call_batched(name: str, function: Any, prompt: Prompt, rollouts: list[Rollout]) -> list[Any]:
    values = await _returned(function, prompt, tuple(rollouts))
    if isinstance(values, Failed):
        return [values] * len(rollouts)
    return check_values(name, function, values, len(rollouts), prompt)


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
