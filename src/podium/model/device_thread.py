"""The threads that run torch, and the random states of the process.

Engine and trainer of one process take turns on one thread. The event loop stays free for rewards and signals, and the
process has one team of CPU threads (`one_team`) instead of two that compete for the cores. On CUDA, an engine with its
own weights has its own thread and stream, so that engine and trainer run at the same time.

The random states are the global ones of torch (CPU and CUDA), Python and NumPy, as tensors. Podium's own sampling does
not use them; dropout and user code may.
"""

import asyncio
import random
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import set_num_threads  # vLLM puts a function that does nothing in its place

from podium.errors import NoProgressError
from podium.model.fused import set_compiler

P = ParamSpec("P")
T = TypeVar("T")

BEFORE_OTHERS = -1
"""Priority of a stream whose short kernels run between the long kernels of another stream."""
STAND_STILL_S = 5.0
"""How long a caller that gives up waits for the thread to leave the iterator."""
FREE_S = 600.0
"""How long to wait for a call that an earlier run of this process left running."""


class DeviceThread:
    """Runs one call after the other; their kernels go to `stream`, or to the device's default stream."""

    def __init__(self, name: str, stream: torch.cuda.Stream | None = None) -> None:
        self.stream = stream
        self.busy = threading.RLock()
        """Held while a call runs."""
        self._pool = ThreadPoolExecutor(1, name, self._begin)

    def _begin(self) -> None:
        """Runs in the thread itself: torch keeps the stream and, from 2.13 on, the compiler settings per thread."""
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
        """Yields each item as soon as it is made.

        The thread continues with the next item by itself, so a slow consumer or a busy event loop does not make the
        device wait. Other calls of this thread run between two items.
        """
        loop, made, stopped = asyncio.get_running_loop(), asyncio.Queue[Any](), threading.Event()

        def make() -> None:
            """Makes an item, hands it to the event loop, and asks for the next one."""
            try:
                with self.busy:
                    item = _END if stopped.is_set() else next(items, _END)
                loop.call_soon_threadsafe(made.put_nowait, (item, None))
                if item is not _END:
                    self._pool.submit(make)
            except BaseException as error:
                with suppress(RuntimeError):  # the loop is closed, which ends this
                    loop.call_soon_threadsafe(made.put_nowait, (_END, error))

        item: Any = None
        self._pool.submit(make)
        try:
            while item is not _END:
                item, failure = await made.get()
                if failure is not None:
                    raise failure
                if item is not _END:
                    yield item
        finally:
            stopped.set()
            with suppress(TimeoutError):  # a thread that is stuck does not keep the caller
                async with asyncio.timeout(STAND_STILL_S):
                    while item is not _END:
                        item, _ = await made.get()

    def set_team(self, threads: int) -> None:
        """Sets how many CPU threads work on a call."""

        def set_threads() -> None:
            torch.get_num_threads()  # otherwise the thread's first product would reset it to the process's number
            set_num_threads(threads)

        try:
            self._pool.submit(set_threads).result(FREE_S)
        except TimeoutError:
            raise NoProgressError(
                f"a call of an earlier run in this process is still running, {FREE_S:.0f} s after this run requested "
                "the device; start a new process"
            ) from None

    def close(self) -> None:
        """Accepts no more calls; those already submitted run to their end."""
        self._pool.shutdown(wait=False)


SHARED = DeviceThread("device")
"""The thread of the trainer, and of engines that take turns with it."""
on_device_thread = SHARED.run


_team: int | None = None
"""Number of CPU threads of the device thread, while inside `one_team`."""


@contextmanager
def one_team() -> Iterator[None]:
    """Gives the CPU threads that torch would start for the caller to the device thread; the caller keeps one thread.

    The caller loads the model, which would start a team of its own. That team would then only wait, but OpenMP would
    see more threads than cores, and would put the other team to sleep and wake it at every product.
    """
    global _team
    if _team is not None:
        yield
        return
    threads = torch.get_num_threads()
    SHARED.set_team(threads)
    _team = threads
    try:
        set_num_threads(1)  # for this thread, and for threads that use torch for the first time later
        yield
    finally:
        set_num_threads(threads)
        _team = None


def team_size() -> int:
    """Number of CPU threads that run torch's work."""
    return _team or torch.get_num_threads()


def beside_the_trainer(device: torch.device) -> DeviceThread:
    """A thread for an engine on this CUDA device whose weights no trainer changes."""
    return DeviceThread("engine", torch.cuda.Stream(device, priority=BEFORE_OTHERS))


_END: Any = object()


def seed_all(seed: int) -> None:
    """Seeds every global generator, so that nothing from before the run has an effect."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def random_state() -> dict[str, torch.Tensor]:
    version, words, gauss = random.getstate()
    assert version == 3
    numpy_state: Any = np.random.get_state()
    _, keys, position, has_gauss, cached = numpy_state
    states = {
        "random.torch": torch.get_rng_state(),
        "random.python": torch.tensor(words, dtype=torch.int64),
        "random.python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "random.numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
        "random.numpy_gauss": torch.tensor(cached, dtype=torch.float64),
    }
    if torch.cuda.is_available():
        states["random.cuda"] = torch.cuda.get_rng_state()
    return states


@contextmanager
def keeping_random_state() -> Iterator[None]:
    """Leaves every global generator as it was: around checks that are not made in every process of a run."""
    states = random_state()
    try:
        yield
    finally:
        set_random_state(states)


def set_random_state(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["random.torch"].clone())
    gauss = states["random.python_gauss"].tolist()
    random.setstate((3, tuple(states["random.python"].tolist()), gauss[0] if gauss else None))
    *keys, position, has_gauss = states["random.numpy"].tolist()
    cached = float(states["random.numpy_gauss"])
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "random.cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["random.cuda"].clone())
