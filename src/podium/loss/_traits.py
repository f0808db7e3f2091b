"""What a loss says about itself beside its formula, for the parts that surround it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Average = Literal["tokens", "rollouts", "constant"]
"""tokens: mean over all loss tokens of the step (a long answer weighs more); rollouts: mean over rollouts of each
one's mean over its tokens (every answer weighs the same); constant: the sum over rollouts times a constant length, so
that a token's weight depends on no length at all (Dr. GRPO, arXiv 2503.20783)."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Traits:
    average: Average | None = None
    """The only average that the formula allows; None: free."""
    correction_level: Literal["token", "sequence"] = "token"
    """The level at which the correction for the sampler's lag is taken; "sequence" where the ratio is a rollout's."""
    corrects_itself: bool = False
    """Its ratio is against the sampler already, or it has none: a correction on top would count twice."""
    single_update: bool = False
    """Without a ratio it is right for one update per batch only."""


def loss_traits(**traits: Any) -> Callable[[F], F]:
    """Decorator of a loss that is not free in all of this."""

    def mark(function: F) -> F:
        function.traits = Traits(**traits)  # type: ignore[attr-defined]
        return function

    return mark


def traits_of(function: Any) -> Traits:
    return getattr(function, "traits", Traits())
