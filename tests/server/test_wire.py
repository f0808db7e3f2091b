"""A stream whose next line takes long shows that the server is alive, and stops its work when nobody reads it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from podium.server import wire
from podium.server.wire import with_signs_of_life


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HEARTBEAT_S", 0.01)


def test_signs_of_life_stand_between_lines_that_take_long() -> None:
    async def run() -> list[bytes]:
        go_on = asyncio.Event()

        async def lines() -> AsyncGenerator[bytes]:
            yield b"first"
            await go_on.wait()
            yield b"second"

        seen = []
        async for line in with_signs_of_life(lines(), b"."):
            seen.append(line)
            if seen.count(b".") == 3:
                go_on.set()
        return seen

    seen = asyncio.run(run())
    assert seen[:4] == [b"first", b".", b".", b"."]
    assert [line for line in seen if line != b"."] == [b"first", b"second"]


def test_a_stream_that_nobody_reads_any_more_ends_its_work() -> None:
    async def run() -> list[str]:
        told = []

        async def lines() -> AsyncGenerator[bytes]:
            try:
                await asyncio.Event().wait()
                yield b"never"
            finally:
                told.append("ended")

        async with aclosing(with_signs_of_life(lines(), b".")) as stream:
            assert await anext(stream) == b"."
        return told

    assert asyncio.run(run()) == ["ended"]


def test_an_error_reaches_the_reader() -> None:
    async def run() -> None:
        async def lines() -> AsyncGenerator[bytes]:
            yield b"first"
            raise ValueError("broken")

        async for line in with_signs_of_life(lines(), b"."):
            assert line == b"first"

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(run())
