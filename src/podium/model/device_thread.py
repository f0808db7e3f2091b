"""The threads that run torch.

Engine and trainer of one process take turns on one of them, so the event loop stays free for rewards and signals, and
the process has one team of CPU threads instead of two that fight for the cores. On CUDA, an engine with weights of its
own has a thread and a stream of its own: there both work at the same time.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import torch

from podium.model.fused import set_compiler

P = ParamSpec("P")
T = TypeVar("T")

BEFORE_OTHERS = -1
"""Priority of a stream whose short kernels go between the long ones of another."""


class DeviceThread:
    """Runs one call after the other; `stream` is where their kernels go, by default the device's own."""

    def __init__(self, name: str, stream: torch.cuda.Stream | None = None) -> None:
        self.stream = stream
        self.busy = threading.RLock()
        """Held while a call runs."""
        self._pool = ThreadPoolExecutor(1, name, self._begin)

    def _begin(self) -> None:
        """In the thread itself: torch keeps its stream and, from 2.13 on, its compiler's settings by thread."""
        set_compiler()
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Awaits `function(*args, **kwargs)`."""

        def call() -> Any:
            with self.busy:
                return function(*args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    async def made_ahead(self, items: Iterator[T]) -> AsyncGenerator[T]:
        """Each item as soon as it is made. The thread goes on to the next one by itself, so whoever uses them, or keeps
        the event loop busy, does not keep the device waiting; calls of others come between two items."""
        loop, made, stopped = asyncio.get_running_loop(), asyncio.Queue[T](), threading.Event()
        ended: asyncio.Future[None] = loop.create_future()

        def make() -> T:
            with self.busy:
                return _END if stopped.is_set() else next(items, _END)

        def ask() -> None:
            self._pool.submit(make).add_done_callback(hand_over)

        def hand_over(done: Future[T]) -> None:
            failure = done.exception()
            item = done.result() if failure is None else _END
            loop.call_soon_threadsafe(take, item, failure)  # where the loop is closed, this is the end
            if item is not _END:
                try:
                    ask()
                except RuntimeError as closed:
                    loop.call_soon_threadsafe(take, _END, closed)

        def take(item: T, failure: BaseException | None) -> None:
            made.put_nowait(item)
            if failure is not None:
                ended.set_exception(failure)
            elif item is _END:
                ended.set_result(None)

        ask()
        try:
            while (item := await made.get()) is not _END:
                yield item
            await ended  # raises what broke it
        finally:
            stopped.set()
            await asyncio.wait([ended])  # the iterator may be closed only when it stands still

    def close(self) -> None:
        """What was asked for is run to its end; nothing can be asked any more."""
        self._pool.shutdown(wait=False)


SHARED = DeviceThread("device")
"""Of the trainer, and of engines that take turns with it."""
on_device_thread = SHARED.run


def beside_the_trainer(device: torch.device) -> DeviceThread:
    """A thread for an engine on this CUDA device whose weights no trainer changes."""
    return DeviceThread("engine", torch.cuda.Stream(device, priority=BEFORE_OTHERS))


_END: Any = object()
