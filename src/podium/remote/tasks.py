"""How tasks wait and end, and an event loop in a thread of its own.

A pool lives in a `LoopThread`, so it watches and replaces its workers while the run's own event loop is busy, or
between two event loops of the run. Callers await from their own event loop.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
SETTLE_S = 0.05
"""A closed connection releases its socket one turn of the loop later."""


class LoopThread:
    """Starts with the first call."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop.set_exception_handler(_ignore_late_answers)
            self._thread = threading.Thread(target=self._loop.run_forever, name="pool", daemon=True)
            self._thread.start()
        return self._loop

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs the coroutine in the thread and returns its result; cancelling the call cancels the coroutine."""
        return await asyncio.wrap_future(self.start(coroutine))

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs the coroutine in the thread; the caller may wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def finish(self, last: Coroutine[Any, Any, None], limit_s: float) -> None:
        """Runs `last` in the thread, cancels all other tasks there and ends the thread."""
        if self._loop is None or self._thread is None:
            last.close()
            return
        try:
            self.start(last).result(limit_s)
            self.start(_cancel_others()).result(limit_s)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(limit_s)
            if not self._thread.is_alive():
                self._loop.close()
            self._loop = self._thread = None


def _ignore_late_answers(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """If a unix socket becomes readable in the turn in which its reader is cancelled, anyio sets the result of a future
    that is done already. That does no harm."""
    if not isinstance(context.get("exception"), asyncio.InvalidStateError):
        loop.default_exception_handler(context)


class Changes:
    """Lets tasks of one event loop wait until something holds."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Whoever waits looks again."""
        self._next.set()
        self._next = asyncio.Event()

    async def until(self, holds: Callable[[], T]) -> T:
        """What `holds` returns, once that is true."""
        while not (found := holds()):
            await self._next.wait()
        return found


async def end_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels them and waits until they have ended."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def all_or_none(works: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Runs all at the same time. If one fails, or the caller is cancelled, the others are cancelled and have ended when
    this returns."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end_tasks(tasks)


async def _cancel_others() -> None:
    await end_tasks(asyncio.all_tasks() - {asyncio.current_task()})
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
    await asyncio.sleep(SETTLE_S)
