import asyncio
import threading
from collections.abc import Iterator

from podium.model.device_thread import made_ahead


def test_the_next_item_is_made_while_this_one_is_used() -> None:
    second = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        second.set()
        yield 2

    async def use() -> list[int]:
        found = []
        async for item in made_ahead(items()):
            assert await asyncio.to_thread(second.wait, 10), "nothing is made while an item is used"
            found.append(item)
        return found

    assert asyncio.run(use()) == [1, 2]


def test_given_up_it_waits_for_the_item_under_way_and_makes_no_more() -> None:
    made = []

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    async def use() -> int:
        ahead = made_ahead(items())
        async for item in ahead:
            await ahead.aclose()
            return len(made) + 0 * item
        raise AssertionError("no item")

    assert asyncio.run(use()) == len(made) == 2
