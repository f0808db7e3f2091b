"""What the loops tell as they run: seconds of the two sides, events, prompts that are out, and stop requests."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from podium.errors import EngineError, RunStopped, StorageError
from podium.observer import Observer, eagerly
from podium.records import Batch, Group, Prompt, UpdateResult
from tests.builders import make_group, make_prompt, make_rollout


class HandClock:
    """Turned by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def some_prompts(count: int) -> list[Prompt]:
    return [make_prompt(ordinal) for ordinal in range(count)]


async def some_groups(count: int) -> AsyncIterator[Group]:
    for prompt in some_prompts(count):
        yield make_group(prompt=prompt)


def test_laps_add_up_to_the_time_that_passed_and_are_taken_once() -> None:
    hand = HandClock()
    observer = Observer(now=hand)
    for stage, seconds in (("rollout", 3.0), ("train", 2.0), ("rollout", 1.0)):
        hand.now += seconds
        observer.end(stage)
    taken = observer.take()
    assert {stage: taken[stage] for stage in ("rollout", "train")} == {"rollout": 4.0, "train": 2.0}
    assert (taken["trainer_waits"], taken["engine"], taken["engine_waits"], taken["overlapped"]) == (4.0, 0.0, 6.0, 0.0)
    hand.now += 5
    observer.end("sync")
    sides = {"trainer_waits": 0.0, "engine": 0.0, "engine_waits": 5.0, "overlapped": 0.0}
    assert observer.take() == {"sync": 5.0, **sides}


def test_the_engine_is_at_work_from_the_sending_of_the_prompts_to_the_last_group() -> None:
    hand = HandClock()
    observer = Observer(now=hand)

    async def run() -> None:
        first = observer.writing(some_groups(2), some_prompts(2))
        hand.now += 1  # 1 s of rollout, the engine at work
        await anext(first)
        observer.end("rollout")
        hand.now += 2  # 2 s of training, the engine at work
        assert observer.num_writing == 1
        await anext(first)
        hand.now += 4  # 4 s of training, the engine idle
        observer.end("train")
        second = observer.writing(some_groups(1), some_prompts(1))
        hand.now += 8  # 8 s of sync, the engine at work
        await anext(second)
        observer.end("sync")

    asyncio.run(run())
    taken = observer.take()
    assert (taken["rollout"], taken["train"], taken["sync"]) == (1.0, 6.0, 8.0)
    assert (taken["engine"], taken["engine_waits"]) == (11.0, 4.0)
    assert taken["overlapped"] == 2.0


def test_a_loop_that_is_broken_off_ends_with_the_commit_of_the_last_window() -> None:
    async def broken_off() -> str:
        raise RunStopped

    async def whole() -> str:
        return "finished"

    async def commit_last() -> str:
        return "committed"

    for loop, end in ((broken_off, "committed"), (whole, "finished")):
        assert asyncio.run(Observer().run(loop(), commit_last, nullcontext())) == end


def test_groups_that_never_came_are_not_written_for_ever() -> None:
    observer = Observer()

    async def broken() -> AsyncIterator:
        yield make_group()
        raise EngineError("gone")

    async def run() -> None:
        async for _ in observer.writing(broken(), some_prompts(5)):
            assert observer.num_writing == 4

    with pytest.raises(EngineError):
        asyncio.run(run())
    assert observer.num_writing == 0


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


class Log:
    """The event log of an observer, seconds left out."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, kind: str, **details: Any) -> None:
        self.lines.append((kind, {key: value for key, value in details.items() if key != "seconds"}))


def test_prompts_that_are_sent_and_groups_that_come_back_are_events() -> None:
    log = Log()
    observer = Observer(event=log)
    written = tuple(make_rollout(policy_version_min=first, policy_version_max=4) for first in (3, 2))

    async def groups() -> AsyncIterator[Group]:
        yield make_group((0.0, 1.0), prompt=make_prompt(0), rollouts=written)
        yield Group(make_prompt(1), (), num_retries=3)

    async def run() -> None:
        coming = observer.writing(groups(), some_prompts(2))
        assert log.lines == []  # nothing is sent before the first group is asked for
        assert [group.prompt.ordinal async for group in coming] == [0, 1]

    asyncio.run(run())
    assert log.lines == [
        ("sampling", {"ordinals": [0, 1]}),
        ("group", {"ordinal": 0, "policy_version": [2, 4]}),
        ("dropped_group", {"ordinal": 1, "retries": 3}),
    ]


def test_a_training_step_and_a_push_that_changes_the_engine_are_events() -> None:
    log, engine = Log(), SimpleNamespace(policy_version=0)
    observer = Observer(event=log, engine=engine, channel="disk")

    async def train(_: object) -> UpdateResult:
        log("stage")
        return UpdateResult(True, 1, {})

    async def push(version: int) -> None:
        engine.policy_version = version

    async def run() -> None:
        await observer.training(train, [cast(Batch, None)] * 3)
        await observer.pushing(push(1))
        await observer.pushing(push(1))  # the engine holds it already

    asyncio.run(run())
    assert log.lines == [
        ("training", {"batches": 3}),
        ("stage", {}),
        ("trained", {"updated": True}),
        ("pushed", {"policy_version": 1, "channel": "disk"}),
    ]


def test_it_knows_the_stage_and_the_prompts_that_are_out_and_when_something_moved_last() -> None:
    hand = HandClock()
    observer = Observer(now=hand)

    async def evaluate() -> None:
        assert observer.stage == "evaluation"
        hand.now += 1

    async def run() -> None:
        assert observer.stage == "start"
        scored = observer.scored(observer.writing(some_groups(2), some_prompts(3)))
        await anext(scored)
        assert (observer.stage, observer.unwritten, observer.unscored) == ("rollout and reward", {1, 2}, set())
        hand.now += 1
        others = observer.writing(some_groups(1), [make_prompt(7), make_prompt(8)])
        await anext(others)  # its group is of prompt 0
        assert (observer.unwritten, observer.unscored, observer.moved_at) == ({1, 2, 7, 8}, {0}, 101.0)
        await observer.during("eval", evaluate())
        assert (observer.stage, observer.moved_at) == ("after evaluation", 102.0)

    asyncio.run(run())


async def slow_groups(closed: list[str]) -> AsyncIterator[Group]:
    """One group, and then none for ever."""
    try:
        yield make_group(prompt=make_prompt(0))
        await asyncio.Event().wait()
    finally:
        closed.append("closed")


def test_a_stop_request_breaks_sampling_off_and_frees_the_engine() -> None:
    stops, closed = [False], []
    observer = Observer(stop_requested=lambda: stops[0])

    async def run() -> None:
        observer.start_window()
        async for _ in observer.writing(slow_groups(closed), some_prompts(2)):
            stops[0] = True

    with pytest.raises(RunStopped):
        asyncio.run(run())
    assert closed == ["closed"]
    assert observer.num_writing == 0


@pytest.mark.parametrize("begins", ["after a training step", "in the async loop"])
def test_a_stop_request_lets_sampling_finish(begins: str) -> None:
    """Where the window has trained, breaking it off would lose that; the async loop looks for signals itself."""
    observer = Observer(stop_requested=lambda: True)

    async def train(_: object) -> UpdateResult:
        return UpdateResult(True, 1, {})

    async def run() -> list[Group]:
        if begins == "after a training step":
            observer.start_window()
            await observer.training(train, [])
        return [group async for group in observer.writing(some_groups(2), some_prompts(2))]

    assert len(asyncio.run(run())) == 2


def test_once_a_step_trains_groups_that_are_being_written_are_not_broken_off_any_more() -> None:
    stops = [False]
    observer = Observer(stop_requested=lambda: stops[0])

    async def train(_: object) -> UpdateResult:
        stops[0] = True
        return UpdateResult(True, 1, {})

    async def run() -> list[Group]:
        observer.start_window()
        coming = observer.writing(some_groups(2), some_prompts(2))
        first = await anext(coming)
        await observer.training(train, [])
        return [first, *[group async for group in coming]]

    assert len(asyncio.run(run())) == 2


def test_an_event_that_cannot_be_written_ends_the_step_before_it_begins() -> None:
    began = []

    async def train(batches: object) -> UpdateResult:
        began.append(batches)
        return UpdateResult(True, 1, {})

    def lost(kind: str, **details: Any) -> None:
        raise StorageError("the run's folder is gone")

    with pytest.raises(StorageError):
        asyncio.run(Observer(event=lost).training(train, []))
    gc.collect()  # a coroutine that nobody awaited would warn, and a warning is an error here
    assert not began


def test_seconds_before_the_laps_start_belong_to_no_step() -> None:
    hand = HandClock()
    observer = Observer(now=hand)
    hand.now += 7
    observer.end("sync")
    hand.now += 7
    observer.start_laps()
    hand.now += 2
    observer.end("rollout")
    taken = observer.take()
    assert "sync" not in taken
    assert taken["rollout"] == 2.0
