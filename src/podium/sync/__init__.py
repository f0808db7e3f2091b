"""What every sync channel shares: one push at a time, finite weights only, and a parity check after each push.

The parity check is always on. First the engine shows the tensors that it samples with, which must equal the trainer's
bit for bit (model/evidence.py). That finds an adapter that was not applied, an old version, a wrong scale, a missing
layer. Then engine and trainer score a few fixed tokens. Another vocabulary, a broken kernel or a wrong model give other
logprobs. How far logprobs may differ is measured: while the weights are proven equal, their gap is rounding.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import get_total_norm

from podium.errors import ParityError, WeightsError
from podium.model.device_thread import on_device_thread
from podium.model.evidence import Held, allowed_gap, difference, mean_gap, unlikeliness
from podium.model.handoff import publish, remove_published
from podium.model.load import Policy
from podium.stages import Engine, Trainer

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest mean difference of logprobs, by the precision of the computation; larger for unlikely tokens."""
FLOOR = {"float32": 5e-5, "bfloat16": 0.01}
"""A difference of this size is always allowed, as rounding."""
SAFETY = 8.0
"""The allowed gap is this many times the largest gap measured with proven weights."""

Compare = Callable[[Held], Awaitable[str | None]]
"""Describes how the engine's weights differ from the trainer's; None if they do not."""


@dataclass
class Noise:
    """The largest gap between logprobs of equal weights so far, per member of the engine."""

    precision: str
    _largest: dict[str | None, float] = field(default_factory=dict)
    """Gaps, divided by how unlikely the tokens were."""

    def allowed(self, member: str | None, expected: Sequence[float]) -> float:
        """Before the first measurement the tolerance of the precision, afterwards a multiple of the measured gap."""
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
    has_members = engine.traits.has_members
    scores = await engine.score_each(probe) if has_members else {None: await engine.score(probe)}  # type: ignore[attr-defined]
    for member, found in scores.items():
        where = _where(name, member)
        if len(expected) != len(found):
            raise ParityError(f"{where} returned {len(found)} logprobs for a probe of {len(expected)}")
        gap, allowed = mean_gap(expected, found), noise.allowed(member, expected)
        if not gap <= allowed:
            reason = "its weights are stale, or the adapter is not applied"
            if member in proven:
                reason = "it holds the trainer's weights, but computes something else with them"
            raise ParityError(
                f"{where} does not sample from the trained weights: after the sync to policy version {version} its "
                f"logprobs differ from the trainer's by {gap:.2e} on average; {allowed:.2g} is allowed; {reason}"
            )
        if member in proven:
            noise.measured(member, expected, gap)


async def _check_held(engine: Any, name: str, version: int, compare: Compare) -> set[str | None]:
    """The members proven to hold the trainer's weights bit for bit; members that cannot show theirs are left out."""
    if not engine.traits.shows_weights:
        return set()
    of_members = await engine.held_each() if engine.traits.has_members else {None: await engine.held()}
    shown = {member: held for member, held in of_members.items() if held is not None}
    for member, held in shown.items():
        if (problem := await compare(held)) is not None:
            raise ParityError(
                f"{_where(name, member)} does not sample from the trained weights: after the sync to policy version "
                f"{version} {problem}"
            )
    return {member for member, held in shown.items() if not held.unseen}


def _where(name: str, member: str | None) -> str:
    return f"engine {name}" if member is None else f"engine {name}, member {member},"


@torch.no_grad()
def check_finite(weights: Iterable[tuple[str, torch.Tensor]], when: str) -> None:
    """Raises `WeightsError` naming the first tensor that is not finite; synchronises with the device once.

    One NaN or infinity makes the norm of all tensors not finite. A norm can also overflow from finite values, so each
    tensor is then checked by itself.
    """
    named = list(weights)
    if math.isfinite(get_total_norm([tensor for _, tensor in named])):
        return
    for name, tensor in named:
        if not tensor.isfinite().all():
            raise WeightsError(
                f"{name} holds values that are not finite numbers {when}; the last checkpoint was written before that: "
                "resume with a lower trainer.lr"
            )


KEPT_FOLDERS = 2
"""Published folders that stay: the one in use and the one before it."""


@dataclass
class Delivery:
    """Pushes weights from one trainer to one engine; a channel supplies the transfer itself."""

    trainer: Trainer
    engine: Engine
    policy: Policy
    probe: Sequence[int]
    noise: Noise
    folder: Path
    """The run folder; weights are published under it unless the channel has another place."""
    run_id: str = "run"
    """The same after a resume; engines that outlive runs use it to tell runs apart."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _published: list[Path] = field(default_factory=list)

    async def once(self, version: int, carry: Callable[[int], Awaitable[None]]) -> None:
        """Overlapping pushes wait for each other; a push whose version has already arrived does nothing."""
        async with self._lock:
            if self.engine.policy_version == version:
                return
            await self.check_weights(version)
            await carry(version)
            await check_parity(self.trainer, self.engine, self.probe, version, self.noise, self.difference)

    async def check_weights(self, version: int) -> None:
        await on_device_thread(check_finite, self.trainer.weights(), f"before the push of policy version {version}")

    async def difference(self, held: Held) -> str | None:
        """How an engine's weights differ from the trainer's; None if they do not."""
        scale = None if self.policy.peft is None else self.policy.adapter_scale
        return await on_device_thread(difference, self.trainer.weights(), held, scale)

    async def by_folder(self, root: Path | None, version: int) -> None:
        """Publishes the trainer's weights, has the engine read them, then removes older folders."""
        place = root or self.engine.traits.weights_root or self.folder / "weights"
        published = await asyncio.to_thread(publish, place, self.policy, self.trainer.weights(), version)
        self._published.append(published)
        await self.engine.load_folder(published, version)
        while len(self._published) > KEPT_FOLDERS:
            remove_published(self._published.pop(0))

    def remove_folders(self) -> None:
        """For the end of the run: engines hold what they have read, so nothing needs the folders any more."""
        while self._published:
            remove_published(self._published.pop())


class Channel:
    """A way to carry weights to an engine: in memory, unless a subclass overrides `_carry`, which may use
    `by_folder`."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery

    async def push(self, version: int) -> None:
        await self._delivery.once(version, self._carry)

    def close(self) -> None:
        self._delivery.remove_folders()

    async def _carry(self, version: int) -> None:
        await self._delivery.engine.load_weights(self._delivery.trainer.weights(), version)
