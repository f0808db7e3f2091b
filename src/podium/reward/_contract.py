"""What a reward promises: one finite number a rollout, within its declared range, or None to abstain."""

import math
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from podium.errors import RewardContractError
from podium.records import Prompt, Row

F = TypeVar("F", bound=Callable[..., Any])


def declare_range(min_value: float, max_value: float) -> Callable[[F], F]:
    """Decorator: the smallest and largest value that the reward can return. The largest one means "correct"."""

    def mark(function: F) -> F:
        function.min_value, function.max_value = min_value, max_value  # type: ignore[attr-defined]
        return function

    return mark


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
    where = f"reward {name!r} on prompt {prompt.ordinal} ({prompt.source or 'data'})"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RewardContractError(
            f"{where} returned {value!r:.80} of type {type(value).__name__}; return a float, or None to abstain"
        )
    if not abs(value) <= sys.float_info.max:  # also false for an integer that no float can hold
        raise RewardContractError(f"{where} returned {value}; return a finite number, or None to abstain")
    low, high = declared_range(function)
    if not low - 1e-9 <= value <= high + 1e-9:
        raise RewardContractError(f"{where} returned {value}, outside its declared range [{low}, {high}]")
    return float(value)
