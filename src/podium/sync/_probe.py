"""Checks that are always on: after a sync, the engine holds the trainer's weights and computes with them.

First the engine shows the tensors that it samples with, and they must be the trainer's to the last bit
(model/evidence.py). That finds an adapter that was not applied, an older version, another scale, a layer left out. Then
a few fixed tokens go through both. Another vocabulary, a broken kernel or a wrong model give other logprobs.
How far logprobs may be apart is measured: while the weights are proven equal, their gap is what rounding does.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podium.errors import ParityError
from podium.model.agreement import allowed_gap, mean_gap, unlikeliness
from podium.model.evidence import Held
from podium.stages import Engine, Trainer

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest mean difference of logprobs, by the precision in which the two sides compute; more for unlikely tokens."""
FLOOR = {"float32": 5e-5, "bfloat16": 0.01}
"""What rounding may always do."""
SAFETY = 8.0
"""Times the largest gap that proven weights have shown so far."""

Compare = Callable[[Held], Awaitable[str | None]]
"""Says what of the engine's weights is not the trainer's; None: nothing."""


@dataclass
class Noise:
    """How far logprobs of the same weights have been apart, by member of the engine."""

    precision: str
    _largest: dict[str | None, float] = field(default_factory=dict)
    """Gaps by how unlikely the tokens were."""

    def allowed(self, member: str | None, expected: Sequence[float]) -> float:
        """Before the first measurement all that the precision allows, afterwards a multiple of what was measured."""
        most = TOLERANCE[self.precision]
        if member in self._largest:
            most = min(most, max(FLOOR[self.precision], SAFETY * self._largest[member]))
        return allowed_gap(most, expected)

    def measured(self, member: str | None, expected: Sequence[float], gap: float) -> None:
        self._largest[member] = max(self._largest.get(member, 0.0), gap / unlikeliness(expected))


async def check_parity(
    trainer: Trainer, engine: Engine, probe: Sequence[int], version: int, noise: Noise, compare: Compare
) -> None:
    """Raises `ParityError` naming the engine unless it holds the trainer's weights."""
    name = type(engine).__name__
    if engine.policy_version != version:
        raise ParityError(
            f"engine {name} holds policy version {engine.policy_version} after version {version} was pushed"
        )
    proven = await _check_held(engine, name, version, compare)
    expected = await trainer.score(probe)
    for member, found in (await _by_member(engine, "score", probe)).items():
        where = _where(name, member)
        if len(expected) != len(found):
            raise ParityError(f"{where} returned {len(found)} logprobs for a probe of {len(expected)}")
        gap, allowed = mean_gap(expected, found), noise.allowed(member, expected)
        if not gap <= allowed:
            raise ParityError(
                f"{where} does not sample from the trained weights: after the sync to policy version {version} its "
                f"logprobs differ from the trainer's by {gap:.2e} on average, {allowed:.2g} is allowed; "
                f"{_reason(member in proven)}"
            )
        if member in proven:
            noise.measured(member, expected, gap)


async def _check_held(engine: Any, name: str, version: int, compare: Compare) -> set[str | None]:
    """The members that hold the trainer's weights to the last bit: all that can show theirs."""
    if not hasattr(engine, "held") and not hasattr(engine, "held_each"):
        return set()
    shown = {member: held for member, held in (await _by_member(engine, "held")).items() if held is not None}
    for member, held in shown.items():
        if (problem := await compare(held)) is not None:
            raise ParityError(
                f"{_where(name, member)} does not sample from the trained weights: after the sync to policy version "
                f"{version} {problem}"
            )
    return {member for member, held in shown.items() if not held.unseen}


def _reason(is_proven: bool) -> str:
    if is_proven:
        return "it holds the trainer's weights, but computes something else with them"
    return "its weights are stale, or the adapter is not applied"


def _where(name: str, member: str | None) -> str:
    return f"engine {name}" if member is None else f"engine {name}, member {member},"


async def _by_member(engine: Any, call: str, *arguments: Any) -> Mapping[str | None, Any]:
    """By name where the engine has several members."""
    if hasattr(engine, f"{call}_each"):
        return await getattr(engine, f"{call}_each")(*arguments)
    return {None: await getattr(engine, call)(*arguments)}
