"""What a reward promises: one finite number a rollout, within its declared range, or None to abstain."""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

from podium.errors import RewardContractError
from podium.records import Prompt, Row

F = TypeVar("F", bound=Callable[..., Any])
MAX_REWARD = 1e30
"""Larger ones overflow in the differences and squares of advantages, and in float32."""
Style = Literal["each", "together", "batched"]
MARKS = ("min_value", "max_value", "runs_inline", "refuse", "gold", "check_answer")
"""Attributes of a reward function that say more of it than its signature."""


def declare_range(min_value: float, max_value: float) -> Callable[[F], F]:
    """Decorator: the smallest and largest value that the reward can return. The largest one means "correct"."""

    def mark(function: F) -> F:
        function.min_value, function.max_value = min_value, max_value  # type: ignore[attr-defined]
        return function

    return mark


def runs_inline(function: F) -> F:
    """Decorator: quick and harmless whatever the policy wrote, so it needs no worker process and no time limit."""
    function.runs_inline = True  # type: ignore[attr-defined]
    return function


def refuses(check: Callable[..., None]) -> Callable[[F], F]:
    """Decorator: `check(timeout_s, **options)` raises an `InputError`, before the model loads, where it cannot run."""

    def mark(function: F) -> F:
        function.refuse = check  # type: ignore[attr-defined]
        return function

    return mark


def gold_answer(write: Callable[[Prompt], str | None] | str) -> Callable[[F], F]:
    """Decorator for `podium check --rewards`: how a row's answer is written to earn the highest value.

    A function of the prompt, which returns None where the row does not tell; or a text that says why nothing can.
    Without it the answer's own text is taken.
    """

    def mark(function: F) -> F:
        function.gold = write  # type: ignore[attr-defined]
        return function

    return mark


def answer_text(prompt: Prompt) -> str | None:
    """The answer as it stands, the first one of several; None where it is no text or number."""
    answer = prompt.answer[0] if isinstance(prompt.answer, list) and prompt.answer else prompt.answer
    is_plain = isinstance(answer, (str, int, float)) and not isinstance(answer, bool)
    return str(answer) if is_plain else None


def answer_within(before: str, after: str = "") -> Callable[[Prompt], str | None]:
    """For `gold_answer`: the answer's text with something around it."""

    def write(prompt: Prompt) -> str | None:
        text = answer_text(prompt)
        return None if text is None else f"{before}{text}{after}"

    return write


def bind_options(function: Any, options: Mapping[str, Any]) -> Any:
    """The reward with its options bound; its marks stay on it."""
    bound = partial(function, **options)
    for name in MARKS:
        if hasattr(function, name):
            setattr(bound, name, getattr(function, name))
    return bound


def style_of(function: Any) -> Style:
    """How it is called: for each rollout in turn, for all at once (a coroutine function), or once for the group.

    Batched is a reward whose second argument is called `rollouts`. An object may say itself what it is.
    """
    if style := getattr(function, "style", None):
        return style
    try:
        arguments = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some built-in functions have none
        arguments = []
    if arguments[1:2] == ["rollouts"]:
        return "batched"
    return "together" if inspect.iscoroutinefunction(function) else "each"


def declared_range(function: Any) -> tuple[float, float]:
    """The declared range; without one, everything finite."""
    return getattr(function, "min_value", -math.inf), getattr(function, "max_value", math.inf)


def checks_answer(check: Callable[[Row], None]) -> Callable[[F], F]:
    """Decorator: `check` raises an `InputError` where the reward could not use the answer of a row.

    It sees every row before the run starts: a label that nothing can match is found there, and is not a score of 0.
    """

    def mark(function: F) -> F:
        function.check_answer = check  # type: ignore[attr-defined]
        return function

    return mark


def check_value(name: str, function: Any, value: Any, prompt: Prompt) -> float | None:
    """The value as a float, or the breach of contract that it is."""
    if value is None:
        return None
    where = _where(name, prompt)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RewardContractError(
            f"{where} returned {_shown(value)} of type {type(value).__name__}; return a float, or None to abstain"
        )
    try:
        number = float(value)  # from here on a plain one, whatever class it came from
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
    """What a batched reward returned: a list with one value a rollout."""
    where = _where(name, prompt)
    if not isinstance(values, (list, tuple)):
        raise RewardContractError(
            f"{where} returned {_shown(values)} of type {type(values).__name__}; "
            "a reward of a whole group returns a list, one value a rollout"
        )
    values = list(values)  # a list of a class of its own may lie about its length
    if len(values) != count:
        raise RewardContractError(f"{where} returned {len(values)} values for {count} rollouts")
    return [check_value(name, function, value, prompt) for value in values]


def _where(name: str, prompt: Prompt) -> str:
    return f"reward {name!r} on prompt {prompt.ordinal} ({prompt.source or 'data'})"


def _shown(value: Any) -> str:
    """A value of a reward gone wrong may not even have a text."""
    try:
        return f"{value!r:.80}"
    except Exception:
        return "something without a text"
