"""Rollout workers: with a device each, or processes that share cores."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from _simulator.clock import Cores, Interpreter, Shared
from _simulator.scenario import Costs

LEAVE_SHARE = 0.25
"""Of the in-process engine on a CPU: finished rollouts leave a batch once they are this share of it."""


class DeviceWorker:
    """With a GPU of its own: rollouts join and leave the batch at any step, and all of it advances together."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._batch = Shared(lambda users: 1 / (costs.decode_step_s + costs.decode_token_s * users))

    @property
    def busy_s(self) -> float:
        return self._batch.busy_s

    @property
    def slot_s(self) -> float:
        return self._batch.user_s

    async def write(self, groups: Sequence[Sequence[int]]) -> AsyncIterator[int]:
        """The places of the groups, each when it is whole."""
        await asyncio.sleep(self._costs.parcel_s)
        tasks = [asyncio.create_task(self._one(place, lengths)) for place, lengths in enumerate(groups)]
        for task in asyncio.as_completed(tasks):
            yield await task

    async def _one(self, place: int, lengths: Sequence[int]) -> int:
        await self._batch.use(*map(float, lengths))
        return place

    async def work(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class CoreWorker:
    """A process on the shared cores: a parcel's groups in their order, parcels taking turns from answer to answer."""

    def __init__(self, costs: Costs, cores: Cores, session: str) -> None:
        self._costs, self._interpreter = costs, Interpreter(cores, session)
        self._thread = asyncio.Lock()
        self.slot_s = 0.0

    @property
    def busy_s(self) -> float:
        return self._interpreter.busy_s

    async def write(self, groups: Sequence[Sequence[int]]) -> AsyncIterator[int]:
        await self.work(self._costs.parcel_s)
        for place, seconds in enumerate(seconds_by_group(groups, self._costs)):
            async with self._thread:
                began = asyncio.get_running_loop().time()
                await self.work(seconds)
                self.slot_s += (asyncio.get_running_loop().time() - began) * sum(map(len, groups))
            yield place

    async def work(self, seconds: float) -> None:
        await self._interpreter.use(seconds)


def seconds_by_group(groups: Sequence[Sequence[int]], costs: Costs) -> list[float]:
    """Between one answer of a parcel and the next: the decode steps of the batch that they share."""
    slots = sorted((length, place) for place, lengths in enumerate(groups) for length in lengths)
    left = [len(lengths) for lengths in groups]
    seconds, spent, answered = [0.0] * len(groups), 0.0, 0
    step = finished = 0
    while slots:
        step += 1
        spent += costs.decode_step_s + costs.decode_token_s * len(slots)
        while finished < len(slots) and slots[finished][0] <= step:
            finished += 1
        if finished >= max(1, LEAVE_SHARE * len(slots)):
            for _, place in slots[:finished]:
                left[place] -= 1
            slots, finished = slots[finished:], 0
        while answered < len(groups) and not left[answered]:
            seconds[answered], spent, answered = spent, 0.0, answered + 1
    return seconds
