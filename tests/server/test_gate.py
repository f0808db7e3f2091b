"""Answers run side by side; a swap waits for them and is alone."""

import asyncio

import pytest

from podium.server.door import Refusal
from podium.server.served import Gate


async def soon() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_swap_lets_running_answers_end_and_holds_new_ones_back() -> None:
    async def run() -> list[str]:
        gate, told, end = Gate(), [], asyncio.Event()

        async def answer(name: str) -> None:
            async with gate.answering():
                told.append(f"{name} begins")
                await end.wait()
                told.append(f"{name} ends")

        async def swap() -> None:
            async with gate.swapping():
                told.append("swap")

        tasks = [asyncio.create_task(answer("first"))]
        await soon()
        tasks.append(asyncio.create_task(swap()))
        await soon()
        tasks.append(asyncio.create_task(answer("second")))
        await soon()
        assert told == ["first begins"]
        end.set()
        await asyncio.gather(*tasks)
        return told

    assert asyncio.run(run()) == ["first begins", "first ends", "swap", "second begins", "second ends"]


def test_one_too_many_waits_and_leaves_the_queue_when_it_goes_away() -> None:
    async def run() -> None:
        gate, end = Gate(max_running=1), asyncio.Event()

        async def answer() -> None:
            async with gate.answering():
                await end.wait()

        running, waiting = asyncio.create_task(answer()), asyncio.create_task(answer())
        await soon()
        assert (gate.running, gate.waiting) == (1, 1)
        waiting.cancel()
        await soon()
        assert (gate.running, gate.waiting) == (1, 0)
        end.set()
        await running
        await answer()
        assert (gate.running, gate.waiting) == (0, 0)

    asyncio.run(run())


def test_a_load_that_takes_too_long_is_not_taken_for_answers_that_do_not_end() -> None:
    async def run() -> None:
        gate = Gate(drain_s=0.05)

        async def swap() -> None:
            async with gate.swapping():
                await asyncio.sleep(0.1)  # longer than answers may take to end
                raise TimeoutError("the load")

        with pytest.raises(TimeoutError, match="the load"):
            await swap()
        async with gate.answering():  # the gate is open again
            assert gate.running == 1

    asyncio.run(run())


def test_a_swap_gives_up_when_answers_do_not_end() -> None:
    async def run() -> None:
        gate, end = Gate(drain_s=0.05), asyncio.Event()

        async def answer() -> None:
            async with gate.answering():
                await end.wait()

        endless = asyncio.create_task(answer())
        await soon()
        with pytest.raises(Refusal, match=r"still being written after 0\.05 s") as caught:
            async with gate.swapping():
                raise AssertionError("an answer is under way")
        assert caught.value.status == 503
        end.set()
        await endless
        await answer()  # the gate is open again

    asyncio.run(run())
