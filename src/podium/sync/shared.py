"""Sync for an engine in the trainer's process.

Full weights are the same memory, so nothing moves; an adapter is laid over the base in the engine's scratch copy; a
snapshot engine copies. Each push is followed by the parity probe.
"""

from collections.abc import Sequence

from podium.stages import Engine, Trainer
from podium.sync._probe import check_parity


class Shared:
    def __init__(self, trainer: Trainer, engine: Engine, probe: Sequence[int], tolerance: float) -> None:
        self._trainer, self._engine, self._probe, self._tolerance = trainer, engine, probe, tolerance

    async def push(self, version: int) -> None:
        if self._engine.policy_version == version:
            return
        await self._engine.load_weights(self._trainer.weights(), version)
        await check_parity(self._trainer, self._engine, self._probe, version, self._tolerance)
