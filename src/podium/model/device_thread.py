"""The threads that run torch.

Engine and trainer of one process take turns on one of them, so the event loop stays free for rewards and signals, and
the process has one team of CPU threads (`one_team`) instead of two that fight for the cores. On CUDA, an engine with
weights of its own has a thread and a stream of its own: there both work at the same time.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import set_num_threads  # vLLM puts a function that does nothing in its place

from podium.errors import NoProgressError
from podium.model.fused import set_compiler

P = ParamSpec("P")
T = TypeVar("T")

BEFORE_OTHERS = -1
"""Priority of a stream whose short kernels go between the long ones of another."""
FREE_S = 600.0
"""For so long may a call that an earlier run of the process left behind go on."""


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

    def set_team(self, threads: int) -> None:
        """How many CPU threads work on a call."""

        def set_threads() -> None:
            torch.get_num_threads()  # or the thread's first product would set what the process has then
            set_num_threads(threads)

        try:
            self._pool.submit(set_threads).result(FREE_S)
        except TimeoutError:
            raise NoProgressError(
                f"a call of an earlier run in this process is still going on, {FREE_S:.0f} s after this one asked for "
                "the device; start a new process"
            ) from None

    def close(self) -> None:
        """What was asked for is run to its end; nothing can be asked any more."""
        self._pool.shutdown(wait=False)


SHARED = DeviceThread("device")
"""Of the trainer, and of engines that take turns with it."""
on_device_thread = SHARED.run


_team: int | None = None
"""CPU threads of the device thread, inside `one_team`."""


@contextmanager
def one_team() -> Iterator[None]:
    """The CPU threads that torch would give to the caller work for the device thread; the caller has itself alone.

    The caller loads the model, which would make it a team of its own. That one would only wait afterwards, but OpenMP
    sees more threads than cores then, and puts to sleep and wakes the other team at every product.
    """
    global _team
    if _team is not None:
        yield
        return
    threads = torch.get_num_threads()
    SHARED.set_team(threads)
    _team = threads
    try:
        set_num_threads(1)  # of this thread, and of those that come to torch later
        yield
    finally:
        set_num_threads(threads)
        _team = None


def team_size() -> int:
    """CPU threads that torch's work is shared among."""
    return _team or torch.get_num_threads()


def beside_the_trainer(device: torch.device) -> DeviceThread:
    """A thread for an engine on this CUDA device whose weights no trainer changes."""
    return DeviceThread("engine", torch.cuda.Stream(device, priority=BEFORE_OTHERS))


_END: Any = object()
