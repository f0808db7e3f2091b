"""Processes for code that may hang, crash or fill the memory: the driver lends one, and kills it if it breaks.

No thread, alarm or coroutine can stop a regular expression, a big integer or a C library. So a call's time is measured
here, outside the process that runs it, and a late worker is killed with its whole process group. A fresh worker takes
its place. Workers are forked by a fresh interpreter, without torch, that has made the object that they serve
(remote/fork_server.py). What they print goes to standard error, without control characters.

    workers = Workers("my_module:MyObject", {"option": 1}, size=4, memory_mb=1024)
    async with workers.lend() as worker:                    # the same process, and its state, until the block ends
        reply = await worker.call("method", b"content", limit_s=5.0)
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from podium.remote.fork_server import Child, ForkServer, Relay, RemoteError, StartError
from podium.remote.fork_server_process import Limits
from podium.untrusted import warn

START_S = 120.0
"""Limit for making the object, and for a worker to report that it runs."""
MAX_STARTS = 5
"""Attempts to start one worker."""
MAX_FILE_BYTES = 1 << 30
MAX_OPEN_FILES = 512
MAX_MORE_TASKS = 1024
ONE_THREAD: dict[str, str] = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Workers share the cores, and only a process without other threads forks safely."""


class Workers:
    """At most `size` processes, each of which serves `recipe(**arguments)`. Belongs to one event loop; `close` may be
    called after the loop has ended."""

    def __init__(self, recipe: str, arguments: Mapping[str, Any], size: int, memory_mb: int) -> None:
        self._recipe, self._arguments = recipe, arguments
        self._limits = Limits(memory_mb, MAX_FILE_BYTES, MAX_OPEN_FILES, MAX_MORE_TASKS)
        self._server: ForkServer | None = None
        self._relay: Relay | None = None
        self._slots = asyncio.Semaphore(size)
        self._idle: list[Child] = []

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Child]:
        """A worker, as soon as one is free. An exception in the block kills it; `StartError` if none can be started."""
        async with self._slots:
            while self._idle and not self._idle[-1].is_alive:  # it may have died with its server
                self._idle.pop().close()
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                yield worker
            except BaseException:
                with suppress(RemoteError, TimeoutError):
                    await worker.bury()
                raise
            self._idle.append(worker)

    def close(self) -> None:
        """Ends every process; workers start again if they are needed."""
        for worker in self._idle:
            worker.close()
        self._idle.clear()
        if self._server is not None and self._relay is not None:
            self._server.close()
            self._relay.close()
        self._server = self._relay = None

    async def _start(self) -> Child:
        if self._server is None:
            self._relay = Relay()
            self._server = ForkServer(
                self._recipe,
                self._arguments,
                is_shared=True,
                start_s=START_S,
                environment=ONE_THREAD,
                limits=self._limits,
                output=self._relay.descriptor,
            )
        for attempt in range(MAX_STARTS):
            await asyncio.sleep(0.1 * attempt)
            try:
                return await self._server.fork()
            except StartError:
                raise
            except (RemoteError, TimeoutError) as error:  # no room for one more
                warn(f"podium: a worker process cannot be started: {error}")
        raise StartError(f"{MAX_STARTS} attempts failed, see stderr")
