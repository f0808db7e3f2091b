"""Rewards written as classes, for those that load something once or keep a state.

The constructor's keyword-only arguments are the options, `__call__(prompt, rollout)` scores (or `rollouts`, for a whole
group; both may be coroutines), `min_value` and `max_value` say what it can return, and the run sees it mapped to
[0, 1]. An instance is made once, in the process that workers are forked from.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, TypeVar

from podium.errors import InputError
from podium.records import Prompt
from podium.reward._contract import MARKS, Style, bind_options, check_value, check_values, style_of

C = TypeVar("C", bound=type)


def register_reward(name: str) -> Callable[[C], C]:
    """Class decorator: it is found as `path.py:name` or `module:name`, beside its own name.

    The class has `min_value` and `max_value`; `weight`, if it has one, is the default of the table's.
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
        for mark in MARKS:
            if hasattr(cls, mark):
                setattr(self, mark, getattr(cls, mark))
        self.min_value, self.max_value = 0.0, 1.0
        self.style: Style = style_of(partial(cls.__call__, None))

    @cached_property
    def instance(self) -> Any:
        """Made when it is first asked for: the driver of a run with workers never does."""
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
        """Where in the class's own range it is."""
        low, high = self._cls.min_value, self._cls.max_value
        return None if value is None else min(1.0, max(0.0, (value - low) / (high - low)))


def bound_reward(found: Any, options: Mapping[str, Any]) -> Any:
    """A reward with its options bound, function or class; its marks stay on it."""
    if hasattr(found, "registered_name"):
        return Normalised(found, options)
    return bind_options(found, options)
