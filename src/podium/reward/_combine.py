"""From the values of a rollout's rewards to its one number.

Task rewards are weighed and summed. Format rewards stand beside them: one that gates lets a sum above 0 through only
where it has its highest value, one that adds is added to what is left. `scale` multiplies the whole. A rollout is
correct if it has the highest number that its rewards allow.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from podium.errors import RewardContractError
from podium.reward._contract import MAX_REWARD, declared_range
from podium.stages import RewardFunction

CLOSE = 1e-8
"""How near to the highest value counts as that value, of a range of 1 or more; of a smaller one, a share of it."""


@dataclass(frozen=True)
class NamedReward:
    """A reward as the settings name it, its options bound."""

    name: str
    function: RewardFunction
    weight: float = 1.0
    timeout_s: float | None = None
    """What a call may take in a worker process; None: it runs in this process, without a limit."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The bound options as plain data, for the worker."""
    format: Literal["gate", "add"] | None = None
    """None: a task reward."""

    @property
    def highest_share(self) -> float:
        """The most that it can add to the sum; infinite where it declares no range."""
        if self.weight == 0 or self.format == "gate":  # 0 · ∞ is no number
            return 0.0
        return self.weight * declared_range(self.function)[self.weight >= 0]


def total(rewards: Sequence[NamedReward], part: Mapping[str, float | None], scale: float) -> float | None:
    """The rollout's reward; None if any gave no number: a rollout is never judged by a part of its rewards."""
    if any(part[reward.name] is None for reward in rewards):
        return None
    task = _weighed([reward for reward in rewards if reward.format is None], part)
    if not gates_hold(rewards, part):
        task = min(0.0, task)  # what was lost stays lost: breaking the format must not pay
    number = scale * (task + _weighed([reward for reward in rewards if reward.format == "add"], part))
    if not abs(number) <= MAX_REWARD:  # nor NaN
        raise RewardContractError(
            f"the rewards of a rollout add up to {number}, and at most {MAX_REWARD:g} is allowed; lower scoring.scale "
            "or the weights of the rewards"
        )
    return number


def is_correct(rewards: Sequence[NamedReward], part: Mapping[str, float | None]) -> bool | None:
    """Whether the reward is the highest possible; unknown where a reward declares no range or gave no number.

    Each value is compared within its own range, so that neither a small weight nor a small scale hides a difference.
    """
    if any(part[reward.name] is None for reward in rewards) or any(math.isinf(each.highest_share) for each in rewards):
        return None
    summed = [reward for reward in rewards if reward.weight and reward.format != "gate"]
    return all(has_best(each.function, part[each.name], each.weight) for each in summed) and gates_hold(rewards, part)


def gates_hold(rewards: Sequence[NamedReward], part: Mapping[str, float | None]) -> bool:
    gates = [reward for reward in rewards if reward.format == "gate"]
    return all(has_highest(gate.function, part[gate.name]) for gate in gates)


def has_highest(function: Any, value: float | None) -> bool:
    """Whether a reward's own value is its declared maximum."""
    return has_best(function, value, 1.0)


def has_best(function: Any, value: float | None, weight: float) -> bool:
    """Whether a reward's own value is the one that adds the most: its declared minimum where its weight is below 0."""
    low, high = declared_range(function)
    if value is None:
        return False
    allowed = CLOSE * min(1.0, high - low)
    return value >= high - allowed if weight > 0 else value <= low + allowed


def _weighed(rewards: Sequence[NamedReward], part: Mapping[str, float | None]) -> float:
    values = ((reward.weight, part[reward.name]) for reward in rewards)
    return sum((weight * value for weight, value in values if value is not None), 0.0)
