"""Who may use the engine when: answers side by side, a swap of weights alone.

A swap that waits lets the answers under way end and holds new ones back, so that every answer is written by one
version. An asker beyond the room is turned away at once; one that goes away leaves the queue.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from podium.server.refusal import Refusal


class Gate:
    def __init__(self, max_running: int = 256, max_waiting: int = 2048, drain_s: float = 600) -> None:
        self.running = self.waiting = 0
        self._max_running, self._max_waiting, self._drain_s = max_running, max_waiting, drain_s
        self._is_closed = False
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        if self.waiting >= self._max_waiting:
            raise Refusal(503, f"{self.waiting} requests are waiting already; try again later")
        self.waiting += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._is_closed and self.running < self._max_running)
                self.running += 1
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self.running -= 1
            await self._tell()

    @asynccontextmanager
    async def swapping(self) -> AsyncIterator[None]:
        """One at a time; the caller sees to that."""
        self._is_closed = True
        try:
            await self._drain()
            yield
        finally:
            self._is_closed = False
            await self._tell()

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._drain_s), self._changed:
                await self._changed.wait_for(lambda: self.running == 0)
        except TimeoutError:
            raise Refusal(503, f"answers were still being written after {self._drain_s:g} s") from None

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
