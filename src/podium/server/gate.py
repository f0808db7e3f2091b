"""Who may use the engine, when, and for how long.

Answers are written side by side; a swap of weights is alone. A run claims the engine before it pushes weights and
releases the engine when it ends; an engine has one run at a time. A client may go away, and a disk may not answer.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from starlette.requests import Request as HttpRequest

from podium.server.door import Refusal


class Gate:
    """Answers side by side, a swap of weights alone.

    A swap that waits lets the answers under way end and holds new ones back, so that every answer is written by one
    version. An asker beyond the room is turned away at once; an asker that goes away leaves the queue.
    """

    def __init__(self, max_running: int = 256, max_waiting: int = 2048, drain_s: float = 600) -> None:
        """`max_running`: calls that the engine works on at the same time; the others wait outside, where a swap need
        not wait for them."""
        self.running = self.waiting = 0
        self._max_running, self._max_waiting, self._drain_s = max_running, max_waiting, drain_s
        self._is_closed = False
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        if self.waiting >= self._max_waiting:
            raise Refusal(503, f"{self.waiting} requests are waiting already; try again later")
        self.waiting += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._is_closed and self.running < self._max_running)
                self.running += 1
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self.running -= 1
            await self._tell()

    @asynccontextmanager
    async def swapping(self) -> AsyncIterator[None]:
        """One at a time; the caller sees to that."""
        self._is_closed = True
        try:
            await self._drain()
            yield
        finally:
            self._is_closed = False
            await self._tell()

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._drain_s), self._changed:
                await self._changed.wait_for(lambda: self.running == 0)
        except TimeoutError:
            raise Refusal(503, f"answers were still being written after {self._drain_s:g} s") from None

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


T = TypeVar("T")
READ = ["GET", "HEAD"]
"""Methods of a route that only tells something. FastAPI does not add HEAD by itself."""


async def unless_gone(request: HttpRequest, answers: Awaitable[T]) -> T:
    """The answers, or a cancelled engine if the client goes away first."""
    work, gone = asyncio.ensure_future(answers), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise Refusal(503, "the client went away")
        return await work
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def within(limit_s: float, what: str, function: Callable[..., T], *given: Any) -> T:
    """The result of a function that may wait for a disk; 503 when it is not there in time.

    It runs in a thread that the end of the process does not wait for, as it would for one of asyncio's.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not done.done():
            set_outcome(outcome)

    def work() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (done.set_result, function(*given))
        except BaseException as error:
            outcome = (done.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finish, *outcome)

    threading.Thread(target=work, name="disk", daemon=True).start()
    try:
        return await asyncio.wait_for(done, limit_s)
    except TimeoutError:
        raise Refusal(503, f"{what} took more than {limit_s:g} s") from None


Scope = Literal["run", "engine"]
IDLE_S = 900.0
"""Seconds of silence after which another run may take over the claim. The silent run gets an error if it returns."""


@dataclass
class Claim:
    run: str
    scope: Scope
    seen: float


class Claims:
    """Which run owns the engine's weights. The scope of its claim says what becomes of them when the run ends: `run`:
    they go with the run; `engine`: they stay and are served on."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._held: Claim | None = None
        self._kept: Claim | None = None
        """Of the run whose weights stay though it has ended."""

    @property
    def run(self) -> str | None:
        return self._held.run if self._held else None

    def take(self, run: str, scope: Scope) -> None:
        held, kept = self._held, self._kept
        if held is not None and held.run != run and time.monotonic() - held.seen < self._idle_s:
            raise Refusal(409, f"the engine is claimed by run {held.run!r} (scope {held.scope!r})")
        if held is not None and held.run == run and held.scope != scope:
            raise Refusal(409, f"run {run!r} has claimed the engine with scope {held.scope!r}, not {scope!r}")
        if kept is not None and kept.scope != scope:
            raise Refusal(
                409,
                f"the engine keeps the weights of run {kept.run!r} (scope {kept.scope!r}); scope {scope!r} would take "
                f"them away: use scope {kept.scope!r}, or another engine",
            )
        self._held = Claim(run, scope, time.monotonic())

    def check(self, run: str | None) -> None:
        """Refuses a run that lost its claim; notes that a run with a claim is alive. Without a run, one only reads."""
        held = self._held
        if run is None:
            return
        if held is None or held.run != run:
            holder = f"run {held.run!r} has" if held else "nobody has"
            raise Refusal(409, f"run {run!r} has no claim on this engine, {holder}")
        held.seen = time.monotonic()

    def check_writer(self, run: str | None) -> None:
        """Only the run that holds the claim may change weights; without a claim, any client may."""
        if run is None and self._held is not None:
            raise Refusal(409, f"the engine is claimed by run {self._held.run!r} (scope {self._held.scope!r})")
        self.check(run)

    def release(self, run: str) -> Scope | None:
        """The scope of the claim that ends; None where the run had none."""
        held = self._held
        if held is None or held.run != run:
            return None
        self._held = None
        if held.scope == "engine":
            self._kept = held
        return held.scope
