"""What a loss declares about itself besides its formula. Loads no torch: the settings read these traits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from podium.errors import InputError

Average = Literal["tokens", "rollouts"] | int
"""tokens: mean over all loss tokens of the step (a long answer weighs more); rollouts: mean over rollouts of each
rollout's mean over its tokens (every answer weighs the same); a number: the sum divided by rollouts times this length,
so that a token's weight does not depend on any answer's length (Dr. GRPO, arXiv 2503.20783)."""

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Traits:
    average: Average | None = None
    """The only average that the formula allows; None: any."""
    correction_level: Literal["token", "sequence"] = "token"
    """The level of the correction for the sampler's lag; "sequence" if the loss's ratio is per rollout."""
    corrects_itself: bool = False
    """The ratio already divides by the sampler's logprobs, or there is no ratio; a correction would count twice."""
    on_policy: bool = False
    """The loss has no ratio: it is correct only for rollouts of the policy that is updated, so for one update per batch
    and a sampler that does not lag."""
    on_policy_with: Mapping[str, Any] = field(default_factory=dict)
    """Options, and for each the value that removes the ratio or the penalty; the loss is then as with `on_policy`."""

    def is_on_policy(self, options: Mapping[str, Any]) -> bool:
        """Whether the loss with these options is correct on-policy only."""
        return self.on_policy or any(options.get(name) == value for name, value in self.on_policy_with.items())


def loss_traits(**traits: Any) -> Callable[[F], F]:
    """Decorator for a loss whose traits differ from the defaults of `Traits`."""

    def mark(function: F) -> F:
        function.traits = Traits(**traits)  # type: ignore[attr-defined]
        return function

    return mark


def traits_of(function: Any) -> Traits:
    return getattr(function, "traits", Traits())


def refuse_off_policy(
    name: str, traits: Traits, options: Mapping[str, Any], several_updates: str | None, lag: str | None
) -> None:
    """Raises `InputError` if a loss without a ratio would train on rollouts that another policy wrote.

    `several_updates` and `lag` are the settings that cause this; None if no setting does, or the loss corrects for it.
    """
    setting = several_updates or lag
    if setting is None or not traits.is_on_policy(options):
        return
    given = "".join(f" with loss.{key} = {options[key]!r}" for key in traits.on_policy_with)
    raise InputError(
        f"loss.name = {name!r}{given} has no ratio: it is correct only for one update per batch, on rollouts that the "
        f"same weights wrote, and not with {setting}; remove that, or use a loss with a ratio, such as 'grpo'"
    )
