"""The members of a pool that are in service, and how work is routed to them.

Work has a size. It goes to the member with the least work in flight that has room for it; work that has waited longest
goes first. When a member is lost, its open requests end at once.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

from podium.errors import WorkerError


class LostError(WorkerError):
    """The member was lost while a request was open."""


class Worker(Protocol):
    """What a pool asks of a process, server or actor."""

    pid: int | None
    """Of its process, if that process belongs to the run."""

    async def ping(self) -> None:
        """Returns when its event loop answers; raises or waits when it does not."""
        ...

    async def exited(self) -> str:
        """Waits for the end of its process and says how it ended. Waits forever for a server."""
        ...

    async def end(self) -> None:
        """Kills its process group, waits for that and closes the connections to it."""
        ...


class Limit:
    """How much work a member may have in flight: a fixed size, or one that adapts.

    An adaptive limit grows by one request whenever requests wait and all went well. It falls by a quarter when a unit
    of work takes twice as long as it did at best, and by half when the member says that it is busy.
    """

    LEAST, FIRST = 8, 64
    SLOW = 2.0

    def __init__(self, size: int | None) -> None:
        """`size` None: adaptive."""
        self._fixed = size
        self._adaptive = float(self.FIRST)
        self._best_s: float | None = None
        """Seconds per unit of the fastest request so far."""

    @property
    def size(self) -> int:
        return self._fixed if self._fixed is not None else int(self._adaptive)

    def finished(self, seconds: float, units: int, step: int, wanted: bool) -> None:
        """A request of `units` was answered. `wanted`: other requests wait for room, so the limit grows by `step`."""
        unit_s = seconds / max(1, units)
        self._best_s = unit_s if self._best_s is None else min(self._best_s, unit_s)
        if unit_s > self.SLOW * self._best_s:
            self._adaptive = max(self.LEAST, 0.75 * self._adaptive)
        elif wanted:
            self._adaptive += step

    def refused(self) -> None:
        self._adaptive = max(self.LEAST, self._adaptive / 2)


W = TypeVar("W", bound=Worker)


@dataclass(eq=False)
class Member(Generic[W]):
    """A worker, as the pool knows it."""

    name: str
    worker: W
    limit: Limit
    num_in_flight: int = 0
    """Size of its open requests."""
    finished: int = 0
    """Requests that it answered."""
    failed: int = 0
    """Requests in a row that it failed."""
    idle_since: float = field(default_factory=monotonic)
    not_before: float = 0.0
    """It gets no request until then."""
    lost: str | None = None
    """Why it is out of service for good."""
    fault: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Set when a request finds the member broken; the pool then takes it out of service."""
    open: set[asyncio.Future[Any]] = field(default_factory=set)
    """Its open requests."""

    def mark_broken(self, reason: str) -> None:
        if not self.fault.done():
            self.fault.set_result(reason)

    async def attempt(self, work: Awaitable[Any], limit_s: float) -> Any:
        """Awaits `work`. Raises `LostError` as soon as the member is lost."""
        task = asyncio.ensure_future(work)
        self.open.add(task)
        try:
            async with asyncio.timeout(limit_s):
                return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self.lost is not None and current is not None and not current.cancelling():
                raise LostError(self.lost) from None
            raise
        except TimeoutError:
            raise WorkerError(f"no answer within {limit_s:g} s") from None
        finally:
            self.open.discard(task)
            task.cancel()


M = TypeVar("M", bound=Member[Any])


class Members(Generic[M]):
    """The members in service."""

    def __init__(self) -> None:
        self._members: list[M] = []
        self._waiting: deque[tuple[int, M | None, asyncio.Future[M]]] = deque()
        self._failure: BaseException | None = None
        self.waiting_since: float | None = None
        """Since when work has been waiting for room."""

    def __iter__(self) -> Iterator[M]:
        return iter(list(self._members))

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: M) -> None:
        self._members.append(member)
        self._assign()

    def remove(self, member: M, reason: str) -> None:
        """Takes the member out of service for good and ends its open requests."""
        member.lost = reason
        if member in self._members:
            self._members.remove(member)
        for task in list(member.open):
            task.cancel()

    def fail(self, error: BaseException) -> None:
        """Raises `error` in all waiting and future calls of `acquire`."""
        self._failure = error
        while self._waiting:
            *_, assigned = self._waiting.popleft()
            if not assigned.done():
                assigned.set_exception(error)

    async def acquire(self, size: int, first: M | None = None) -> M:
        """`first` if it has room for work of this size; else the member with the least work in flight, once one has
        room."""
        if self._failure is not None:
            raise self._failure
        assigned: asyncio.Future[M] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, first, assigned))
        self._assign()
        try:
            return await assigned
        except asyncio.CancelledError:
            if assigned.done() and not assigned.cancelled() and assigned.exception() is None:
                self.release(assigned.result(), size)
            raise

    def release(self, member: M, size: int) -> None:
        member.num_in_flight -= size
        if member.num_in_flight == 0:
            member.idle_since = monotonic()
        self._assign()

    def rest(self, member: M, for_s: float) -> None:
        """Gives the member no new work for a while."""
        member.not_before = monotonic() + for_s
        asyncio.get_running_loop().call_later(for_s, self._assign)

    def _assign(self) -> None:
        while self._waiting:
            size, first, assigned = self._waiting[0]
            if not assigned.done():
                member = self._with_room(size, first)
                if member is None:
                    self.waiting_since = self.waiting_since or monotonic()
                    return
                member.num_in_flight += size
                assigned.set_result(member)
            self._waiting.popleft()
        self.waiting_since = None

    def _with_room(self, size: int, first: M | None) -> M | None:
        """Work larger than a member's limit goes to a member that has no other work."""
        now = monotonic()
        free = [
            member
            for member in self._members
            if now >= member.not_before
            and (member.num_in_flight == 0 or member.num_in_flight + size <= member.limit.size)
        ]
        return first if first in free else min(free, key=lambda member: member.num_in_flight, default=None)
