"""Seconds of the two sides, with a watch that is turned by hand."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from podium.clock import Clock, eagerly
from podium.errors import EngineError
from tests.builders import make_group


class Watch:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def some_groups(count: int) -> AsyncIterator:
    for _ in range(count):
        yield make_group()


def test_laps_add_up_to_the_time_that_passed_and_are_taken_once() -> None:
    watch = Watch()
    clock = Clock(watch)
    for stage, seconds in (("rollout", 3.0), ("train", 2.0), ("rollout", 1.0)):
        watch.now += seconds
        clock.end(stage)
    taken = clock.take()
    assert {stage: taken[stage] for stage in ("rollout", "train")} == {"rollout": 4.0, "train": 2.0}
    assert (taken["trainer_waits"], taken["engine"], taken["engine_waits"], taken["overlapped"]) == (4.0, 0.0, 6.0, 0.0)
    watch.now += 5
    clock.end("sync")
    sides = {"trainer_waits": 0.0, "engine": 0.0, "engine_waits": 5.0, "overlapped": 0.0}
    assert clock.take() == {"sync": 5.0, **sides}


def test_the_engine_is_at_work_from_the_sending_of_the_prompts_to_the_last_group() -> None:
    watch = Watch()
    clock = Clock(watch)

    async def run() -> None:
        first = clock.writing(some_groups(2), 2)
        watch.now += 1  # 1 s of rollout, the engine at work
        await anext(first)
        clock.end("rollout")
        watch.now += 2  # 2 s of training, the engine at work
        assert clock.num_writing == 1
        await anext(first)
        watch.now += 4  # 4 s of training, the engine idle
        clock.end("train")
        second = clock.writing(some_groups(1), 1)
        watch.now += 8  # 8 s of sync, the engine at work
        await anext(second)
        clock.end("sync")

    asyncio.run(run())
    taken = clock.take()
    assert (taken["rollout"], taken["train"], taken["sync"]) == (1.0, 6.0, 8.0)
    assert (taken["engine"], taken["engine_waits"]) == (11.0, 4.0)
    assert taken["overlapped"] == 2.0


def test_groups_that_never_came_are_not_written_for_ever() -> None:
    clock = Clock()

    async def broken() -> AsyncIterator:
        yield make_group()
        raise EngineError("gone")

    async def run() -> None:
        async for _ in clock.writing(broken(), 5):
            assert clock.num_writing == 4

    with pytest.raises(EngineError):
        asyncio.run(run())
    assert clock.num_writing == 0


def test_eager_items_are_asked_for_while_those_before_are_used_and_come_in_order() -> None:
    asked: list[int] = []

    async def items() -> AsyncIterator[int]:
        for number in range(3):
            asked.append(number)
            yield number

    async def run() -> list[int]:
        taken = []
        async for item in eagerly(items()):
            await asyncio.sleep(0.01)
            assert asked == [0, 1, 2]
            taken.append(item)
        return taken

    assert asyncio.run(run()) == [0, 1, 2]


def test_what_breaks_eager_items_is_raised_behind_those_that_came() -> None:
    async def items() -> AsyncIterator[int]:
        yield 1
        raise EngineError("gone")

    taken = []

    async def run() -> None:
        async for item in eagerly(items()):
            taken.append(item)

    with pytest.raises(EngineError, match="gone"):
        asyncio.run(run())
    assert taken == [1]
