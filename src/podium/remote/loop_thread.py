"""An event loop in a thread of its own.

A pool lives in one: its workers are watched and replaced also while the run's own event loop is busy, and between two
event loops of the run. Callers await from their own event loop.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from podium.errors import WorkerError

T = TypeVar("T")

_END = object()
SETTLE_S = 0.05
"""A connection that was closed releases its socket one turn of the loop later."""


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
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    async def stream(self, items: AsyncIterator[T]) -> AsyncGenerator[T]:
        """Iterates in the thread and yields in the caller's loop; closing this generator closes the iterator."""
        here = asyncio.get_running_loop()
        arrived: asyncio.Queue[Any] = asyncio.Queue()

        def hand_over(thing: Any) -> None:
            with suppress(RuntimeError):  # the caller's loop is closed
                here.call_soon_threadsafe(arrived.put_nowait, thing)

        async def pump() -> None:
            try:
                async for item in items:
                    hand_over(item)
                hand_over(_END)
            except asyncio.CancelledError:
                hand_over(WorkerError("the thread that waited for it has ended"))
                raise
            except BaseException as error:
                hand_over(error)

        pumping = asyncio.run_coroutine_threadsafe(pump(), self.loop)
        try:
            while (thing := await arrived.get()) is not _END:
                if isinstance(thing, BaseException):
                    raise thing
                yield thing
        finally:
            pumping.cancel()

    def finish(self, last: Coroutine[Any, Any, None], limit_s: float) -> None:
        """Runs `last` in the thread, cancels all other tasks there and ends the thread."""
        if self._loop is None or self._thread is None:
            last.close()
            return
        try:
            asyncio.run_coroutine_threadsafe(last, self._loop).result(limit_s)
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(limit_s)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(limit_s)
            if not self._thread.is_alive():
                self._loop.close()
            self._loop = self._thread = None


def _ignore_late_answers(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A unix socket may become readable in the turn in which its reader is cancelled. anyio then sets the result of a
    future that is done, which does no harm."""
    if not isinstance(context.get("exception"), asyncio.InvalidStateError):
        loop.default_exception_handler(context)


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
    await asyncio.sleep(SETTLE_S)
