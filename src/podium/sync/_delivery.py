"""What every sync channel does around its own way of carrying weights: one push at a time, then the proof."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from podium.model.device_thread import on_device_thread
from podium.model.evidence import Held, difference
from podium.model.handoff import publish, remove_published
from podium.model.load import Policy
from podium.stages import Engine, Trainer
from podium.sync._guard import check_finite
from podium.sync._probe import Noise, check_parity

KEPT_FOLDERS = 2
"""Published folders that stay: the one in use and the one before it."""


@dataclass
class Delivery:
    """Between one trainer and one engine."""

    trainer: Trainer
    engine: Engine
    policy: Policy
    probe: Sequence[int]
    noise: Noise
    folder: Path
    """Of the run; weights are published under it unless a channel is told another place."""
    run_id: str = "run"
    """The same after a resume; engines that outlive runs tell them apart by it."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _published: list[Path] = field(default_factory=list)

    async def once(self, version: int, carry: Callable[[int], Awaitable[None]]) -> None:
        """Pushes that overlap wait for each other; one whose version has arrived already does nothing."""
        async with self._lock:
            if self.engine.policy_version == version:
                return
            await self.check_weights(version)
            await carry(version)
            await check_parity(self.trainer, self.engine, self.probe, version, self.noise, self.difference)

    async def check_weights(self, version: int) -> None:
        await on_device_thread(check_finite, self.trainer.weights(), f"before the push of policy version {version}")

    async def difference(self, held: Held) -> str | None:
        """What of an engine's weights is not the trainer's."""
        scale = None if self.policy.peft is None else self.policy.adapter_scale
        return await on_device_thread(difference, self.trainer.weights(), held, scale)

    async def by_folder(self, root: Path | None, version: int) -> None:
        """Publishes the trainer's weights and has the engine read them; older folders go once it has."""
        place = root or getattr(self.engine, "weights_root", None) or self.folder / "weights"
        published = await asyncio.to_thread(publish, place, self.policy, self.trainer.weights(), version)
        self._published.append(published)
        await self.engine.load_folder(published, version)
        while len(self._published) > KEPT_FOLDERS:
            remove_published(self._published.pop(0))

    def remove_folders(self) -> None:
        """Engines hold what they have read, so nothing needs the folders once the run has ended."""
        while self._published:
            remove_published(self._published.pop())
