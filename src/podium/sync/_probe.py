"""One of the checks that are always on: after a sync, engine and trainer agree on a probe.

A few fixed tokens go through both. Stale weights, an adapter that was not applied, another tokenizer's vocabulary or
a broken copy all show up as different logprobs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from podium.errors import ParityError
from podium.model.agreement import allowed_gap, mean_gap
from podium.stages import Engine, Trainer

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest mean difference of logprobs, by the precision in which the two sides compute; more for unlikely tokens."""


async def check_parity(trainer: Trainer, engine: Engine, probe: Sequence[int], version: int, tolerance: float) -> None:
    """Raises `ParityError` naming the engine unless it holds the trainer's weights."""
    name = type(engine).__name__
    if engine.policy_version != version:
        raise ParityError(
            f"engine {name} holds policy version {engine.policy_version} after version {version} was pushed"
        )
    expected = await trainer.score(probe)
    allowed = allowed_gap(tolerance, expected)
    for member, found in (await _scores(engine, probe)).items():
        where = f"engine {name}" if member is None else f"engine {name}, member {member},"
        if len(expected) != len(found):
            raise ParityError(f"{where} returned {len(found)} logprobs for a probe of {len(expected)}")
        gap = mean_gap(expected, found)
        if not gap <= allowed:
            raise ParityError(
                f"{where} does not sample from the trained weights: after the sync to policy version {version} its "
                f"logprobs differ from the trainer's by {gap:.2e} on average, {allowed:.2g} is allowed; "
                "its weights are stale, or the adapter is not applied"
            )


async def _scores(engine: Any, probe: Sequence[int]) -> Mapping[str | None, list[float]]:
    """By name where the engine has several members."""
    if hasattr(engine, "score_each"):
        return await engine.score_each(probe)
    return {None: await engine.score(probe)}
