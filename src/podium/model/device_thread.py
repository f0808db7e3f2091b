"""The one thread that runs torch.

Engine and trainer of one process take turns on it, so the event loop stays free for rewards and signals, and the
process has one team of CPU threads instead of two that fight for the cores.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")


async def on_device_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Awaits `function(*args, **kwargs)`."""
    call: Callable[[], Any] = lambda: function(*args, **kwargs)  # noqa: E731
    return await asyncio.get_running_loop().run_in_executor(_thread, call)


async def made_ahead(items: Iterator[T]) -> AsyncGenerator[T]:
    """Each item while the next is being made: whoever uses them does not keep the device waiting."""
    upcoming = asyncio.ensure_future(on_device_thread(next, items, _END))
    try:
        while (item := await upcoming) is not _END:
            upcoming = asyncio.ensure_future(on_device_thread(next, items, _END))
            yield item
    finally:
        await asyncio.wait([upcoming])  # the iterator may be closed only when it stands still


_END: Any = object()
