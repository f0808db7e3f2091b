"""Sync for an engine in the trainer's process.

With full weights, engine and trainer share the same memory; an engine on a CPU packs its large layers again. An
adapter is added to the base weights in the engine's scratch copy. A snapshot engine copies all weights. The parity
check follows each push.
"""

from podium.sync import Channel


class Shared(Channel):
    async def _carry(self, version: int) -> None:
        await self._delivery.engine.load_weights(self._delivery.trainer.weights(), version)
