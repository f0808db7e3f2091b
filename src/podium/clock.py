"""Who worked and who waited: the seconds of each stage, and of the engine beside them.

The trainer's side goes lap by lap, and the laps of a step add up to its wall time. The engine's side is known from the
prompts that were sent and the groups that came back: it is at work while one is missing.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from podium.records import Group

T = TypeVar("T")


class Clock:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lap_began = self._looked = now()
        self._laps: dict[str, float] = defaultdict(float)
        self._engine_in_lap = 0.0
        self._engine: dict[str, float] = defaultdict(float)
        """Seconds in which the engine was at work, by the lap in which they fell."""
        self.num_writing = 0
        """Prompts whose rollouts are being written."""

    def end(self, stage: str) -> None:
        """The lap since the previous one was of this stage."""
        self._look()
        self._laps[stage] += self._looked - self._lap_began
        self._engine[stage] += self._engine_in_lap
        self._lap_began, self._engine_in_lap = self._looked, 0.0

    def take(self) -> dict[str, float]:
        """Seconds by stage since they were taken last, and what they say of the two sides."""
        laps, engine = self._laps, self._engine
        self._laps, self._engine = defaultdict(float), defaultdict(float)
        at_work = sum(engine.values())
        sides = {
            "trainer_waits": laps.get("rollout", 0.0),
            "engine": at_work,
            "engine_waits": sum(laps.values()) - at_work,
            "overlapped": engine.get("train", 0.0),
        }
        return {**laps, **sides}

    def writing(self, groups: AsyncIterator[Group], count: int) -> AsyncIterator[Group]:
        """The same groups; from now on `count` of them are being written."""
        self._change(count)
        return self._as_they_come(groups, count)

    async def _as_they_come(self, groups: AsyncIterator[Group], count: int) -> AsyncIterator[Group]:
        try:
            async for group in groups:
                self._change(-1)
                count -= 1
                yield group
        finally:
            self._change(-count)

    def _change(self, count: int) -> None:
        self._look()
        self.num_writing += count

    def _look(self) -> None:
        now = self._now()
        if self.num_writing:
            self._engine_in_lap += now - self._looked
        self._looked = now


async def eagerly(items: AsyncIterator[T]) -> AsyncIterator[T]:
    """The same items, asked for while the ones before are still being used."""
    queue: asyncio.Queue[T | None] = asyncio.Queue()

    async def ask() -> None:
        try:
            async for item in items:
                queue.put_nowait(item)
        finally:
            queue.put_nowait(None)

    asking = asyncio.create_task(ask())
    try:
        while (item := await queue.get()) is not None:
            yield item
        await asking  # raises what ended it
    finally:
        asking.cancel()
