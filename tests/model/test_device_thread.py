import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
import torch._dynamo
import torch._functorch.config

from podium.check.verdicts import check
from podium.engine.build import cpu_team
from podium.engine.inprocess import Inprocess, PlainDecoder
from podium.errors import InputError, NoProgressError
from podium.model import device_thread
from podium.model.device_thread import SHARED, DeviceThread, one_team, team_size
from podium.model.fused import SAVED_SHARE
from podium.run.folder import RunFolder
from podium.run.start import evaluate, resume, train
from podium.settings.tables import Settings

T = TypeVar("T")


async def take(items: AsyncIterator[T], found: list[T]) -> None:
    async for item in items:
        found.append(item)


def test_the_next_item_is_made_while_this_one_is_used() -> None:
    second = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        second.set()
        yield 2

    async def use() -> list[int]:
        found = []
        async for item in SHARED.made_ahead(items()):
            assert await asyncio.to_thread(second.wait, 10), "nothing is made while an item is used"
            found.append(item)
        return found

    assert asyncio.run(use()) == [1, 2]


def test_a_busy_event_loop_does_not_keep_the_items_waiting() -> None:
    third = threading.Event()

    def items() -> Iterator[int]:
        yield from (1, 2)
        third.set()
        yield 3

    async def use() -> list[int]:
        found = []
        async for item in SHARED.made_ahead(items()):
            assert third.wait(10), "nothing is made while the event loop is busy"
            found.append(item)
        return found

    assert asyncio.run(use()) == [1, 2, 3]


def test_calls_of_others_come_between_two_items() -> None:
    order: list[str] = []
    asked, going_on = threading.Event(), threading.Event()

    def items() -> Iterator[None]:
        asked.set()
        going_on.wait(10)
        for number in range(3):
            order.append(f"item {number}")
            yield

    async def use() -> None:
        async def ask() -> None:
            await asyncio.to_thread(asked.wait, 10)
            call = asyncio.ensure_future(SHARED.run(order.append, "call"))
            await asyncio.sleep(0)  # it is in the queue
            going_on.set()
            await call

        asking = asyncio.ensure_future(ask())
        async for _ in SHARED.made_ahead(items()):
            pass
        await asking

    asyncio.run(use())
    assert order == ["item 0", "call", "item 1", "item 2"]


def test_the_thread_is_held_while_an_item_is_made() -> None:
    thread = DeviceThread("making")

    def is_free() -> bool:
        got = thread.busy.acquire(blocking=False)
        if got:
            thread.busy.release()
        return got

    def items() -> Iterator[bool]:
        with ThreadPoolExecutor(1) as another:
            yield another.submit(is_free).result(10)

    found: list[bool] = []
    asyncio.run(take(thread.made_ahead(items()), found))
    assert found == [False]
    thread.close()


def test_a_closed_thread_ends_what_it_makes_with_an_error() -> None:
    thread = DeviceThread("closing")

    def items() -> Iterator[int]:
        yield 1
        thread.close()
        yield 2

    found: list[int] = []
    with pytest.raises(RuntimeError, match="shutdown"):
        asyncio.run(take(thread.made_ahead(items()), found))
    assert found == [1, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the generator has no loop to end on
def test_a_closed_event_loop_ends_the_making() -> None:
    made: list[int] = []
    going_on = threading.Event()

    def items() -> Iterator[int]:
        for number in range(50):
            made.append(number)
            yield number
            going_on.wait(10)

    thread, loop = DeviceThread("left"), asyncio.new_event_loop()
    ahead = thread.made_ahead(items())
    assert loop.run_until_complete(anext(ahead)) == 0
    loop.close()
    going_on.set()
    thread._pool.submit(lambda: None).result(10)
    thread._pool.shutdown(wait=True)
    assert made == [0, 1]


def test_what_breaks_the_making_is_raised_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    found: list[int] = []
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(take(SHARED.made_ahead(items()), found))
    assert found == [1]


def test_given_up_it_waits_for_the_item_under_way_and_makes_no_more() -> None:
    began, going_on, made = threading.Event(), threading.Event(), []

    def items() -> Iterator[int]:
        for number in range(100):
            if number == 1:
                began.set()
                going_on.wait(10)
            made.append(number)
            yield number

    async def use() -> None:
        ahead = SHARED.made_ahead(items())
        async for _ in ahead:
            began.wait(10)
            closing = asyncio.ensure_future(ahead.aclose())
            await asyncio.sleep(0.1)
            assert not closing.done()
            going_on.set()
            await closing
            return

    asyncio.run(use())
    assert made == [0, 1]


def test_calls_on_one_thread_follow_each_other_and_two_threads_work_at_the_same_time() -> None:
    async def meet(first: DeviceThread, second: DeviceThread) -> None:
        """Both calls end only once they are both under way."""
        barrier = threading.Barrier(2, timeout=0.5 if first is second else 10)
        await asyncio.gather(first.run(barrier.wait), second.run(barrier.wait))

    one, other = DeviceThread("one"), DeviceThread("other")
    asyncio.run(meet(one, other))
    with pytest.raises(threading.BrokenBarrierError):
        asyncio.run(meet(one, one))
    one.close(), other.close()


def test_who_holds_a_thread_keeps_its_calls_waiting() -> None:
    thread, began = DeviceThread("held"), threading.Event()

    async def ask() -> None:
        with thread.busy:
            call = asyncio.ensure_future(thread.run(began.set))
            await asyncio.sleep(0.2)
            assert not began.is_set()
        await call

    asyncio.run(ask())
    assert began.is_set()
    thread.close()


def test_a_closed_thread_ends_once_its_call_has() -> None:
    thread, going_on = DeviceThread("ending"), threading.Event()

    async def close_under_way() -> None:
        call = asyncio.ensure_future(thread.run(going_on.wait, 10))
        await asyncio.sleep(0.1)
        thread.close()
        assert is_alive("ending")
        going_on.set()
        assert await call
        with pytest.raises(RuntimeError, match="shutdown"):
            await thread.run(lambda: None)

    asyncio.run(close_under_way())
    deadline = time.monotonic() + 10
    while is_alive("ending"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(name: str) -> bool:
    return any(each.name.startswith(name) for each in threading.enumerate())


def test_every_thread_has_the_compilers_settings() -> None:
    """torch keeps them by thread from 2.13 on."""

    def found() -> tuple[Any, ...]:
        dynamo, functorch = torch._dynamo.config, torch._functorch.config
        kept = functorch.activation_memory_budget, functorch.is_non_builtin_to_include
        return dynamo.specialize_float, dynamo.recompile_limit, *kept

    thread = DeviceThread("compiling")
    assert asyncio.run(thread.run(found)) == (True, 64, SAVED_SHARE, True)
    thread.close()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    device_thread.set_num_threads(2)  # torch's own, whatever vLLM has put in its place
    yield
    SHARED.set_team(before)
    device_thread.set_num_threads(before)


def threads_there(run: Any) -> int:
    """CPU threads that a product has, where `run` runs it."""

    def product() -> int:
        torch.ones(64, 64) @ torch.ones(64, 64)
        return torch.get_num_threads()

    return run(product)


def elsewhere(function: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def on_shared(function: Any) -> Any:
    return asyncio.run(SHARED.run(function))


def here(function: Any) -> Any:
    return function()


def test_the_cpu_threads_work_for_the_device_thread_alone(two_threads: None) -> None:
    for _ in range(2):  # a second run in the process has them too
        with one_team():
            assert team_size() == 2
            assert [threads_there(run) for run in (here, on_shared, elsewhere)] == [1, 2, 1]
        assert [threads_there(run) for run in (here, on_shared)] == [2, 2]
    assert team_size() == 2


def test_a_team_within_a_team_is_the_same(two_threads: None) -> None:
    with one_team():
        with one_team():
            assert [threads_there(run) for run in (here, on_shared)] == [1, 2]
        assert [threads_there(run) for run in (here, on_shared)] == [1, 2]
    assert threads_there(here) == 2


def test_a_device_that_an_earlier_run_left_stuck_is_told_every_time(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_thread, "FREE_S", 0.1)
    stuck, free = DeviceThread("stuck"), threading.Event()
    monkeypatch.setattr(device_thread, "SHARED", stuck)
    stuck._pool.submit(free.wait, 10)
    for _ in range(2):
        with pytest.raises(NoProgressError, match=r"is still running, .* start a new process"), one_team():
            pass
        assert threads_there(here) == 2
    free.set()
    stuck.close()


def test_threads_are_given_back_where_vllm_has_replaced_torchs_function(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_team():
        monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    assert threads_there(here) == 2


def test_a_run_gives_the_callers_threads_back_though_it_fails(two_threads: None, small: Settings) -> None:
    broken = small.model_copy(update={"model": small.model.model_copy(update={"name": "nowhere/nothing"})})
    with pytest.raises(InputError):
        train(broken)
    assert threads_there(here) == 2


Job = Callable[[Settings], Any]


def resumed(settings: Settings) -> None:
    train(settings)
    SEEN.clear()
    longer = settings.model_copy(update={"run": settings.run.model_copy(update={"steps": 5})})
    assert settings.run.folder is not None
    resume(longer, RunFolder(settings.run.folder))


def evaluated(settings: Settings) -> None:
    evaluate(Settings.from_dict(settings.to_dict() | {"eval": {"data": [{"name": "arithmetic", "max_rows": 4}]}}))


SEEN: list[int] = []
"""CPU threads of whoever made an engine."""


@pytest.mark.parametrize("job", [train, resumed, evaluated, check], ids=lambda job: job.__name__)
def test_an_engine_is_made_without_the_team_that_it_works_with(
    job: Job, two_threads: None, small: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, drawn = Inprocess._check_decoding, PlainDecoder._prefill
    SEEN.clear()
    at_work: set[int] = set()

    def seen_made(self: Inprocess) -> None:
        SEEN.append(torch.get_num_threads())
        made(self)

    def seen_drawn(self: PlainDecoder, *given: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            at_work.add(torch.get_num_threads())
        return drawn(self, *given)

    monkeypatch.setattr(Inprocess, "_check_decoding", seen_made)
    monkeypatch.setattr(PlainDecoder, "_prefill", seen_drawn)
    job(small)
    assert set(SEEN) == {1}  # with the engine that is tried out on the small copy
    assert at_work == {2}
    assert threads_there(here) == 2


@pytest.mark.parametrize(
    ("device", "engine", "has_gpu", "has_team"),
    [
        ("auto", "inprocess", False, True),
        ("cpu", "pool", True, True),
        ("auto", "inprocess", True, False),
        ("cpu", "vllm_local", False, False),
    ],
)
def test_who_has_a_team(
    device: str, engine: str, has_gpu: bool, has_team: bool, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    with cpu_team(Settings.from_dict({"model": {"device": device}, "engine": {"name": engine}})):
        assert threads_there(here) == (1 if has_team else 2)
        assert team_size() == 2
