"""Sync for an engine in the trainer's process.

Full weights are the same memory, of which an engine on a CPU packs the large layers; an adapter is laid over the base
in the engine's scratch copy; a snapshot engine copies. Each push is followed by the parity probe.
"""

from podium.sync._delivery import Delivery


class Shared:
    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery

    async def push(self, version: int) -> None:
        await self._delivery.once(version, self._carry)

    def close(self) -> None:
        """Nothing is left behind."""

    async def _carry(self, version: int) -> None:
        await self._delivery.engine.load_weights(self._delivery.trainer.weights(), version)
