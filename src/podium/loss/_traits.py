"""What a loss says about itself beside its formula, for the parts that surround it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from podium.errors import InputError

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
    on_policy: bool = False
    """It has no ratio: it is right only for rollouts of the policy that is updated, so for one update per batch and a
    sampler that does not lag."""
    on_policy_with: Mapping[str, Any] = field(default_factory=dict)
    """Options, and the value of each that takes the ratio or the penalty away; then it is as with `on_policy`."""

    def is_on_policy(self, options: Mapping[str, Any]) -> bool:
        """Whether the loss with these options is right on-policy only."""
        return self.on_policy or any(options.get(name) == value for name, value in self.on_policy_with.items())


def loss_traits(**traits: Any) -> Callable[[F], F]:
    """Decorator of a loss that is not free in all of this."""

    def mark(function: F) -> F:
        function.traits = Traits(**traits)  # type: ignore[attr-defined]
        return function

    return mark


def traits_of(function: Any) -> Traits:
    return getattr(function, "traits", Traits())


def refuse_off_policy(
    name: str, traits: Traits, options: Mapping[str, Any], several_updates: str | None, lag: str | None
) -> None:
    """Raises `InputError` where a loss without a ratio would train rollouts that another policy wrote.

    `several_updates` and `lag` are the settings that bring them; None where there is none, or it is corrected for.
    """
    setting = several_updates or lag
    if setting is None or not traits.is_on_policy(options):
        return
    given = "".join(f" with loss.{key} = {options[key]!r}" for key in traits.on_policy_with)
    raise InputError(
        f"loss.name = {name!r}{given} has no ratio: it is right for one update per batch only, of rollouts that the "
        f"same weights wrote, and not with {setting}; remove that, or take a loss with a ratio, such as 'grpo'"
    )
