"""The members of a pool that are in service, and who gets which of them.

A member is asked for rollouts as long as it has room; the one with the fewest in flight comes first, and whoever waits
longest is served first. A member that is lost takes its open requests with it: they end at once and go to others.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from podium.errors import EngineError

OnEvent = Callable[..., None]
"""Told what happened: `on_event("worker_lost", worker="worker-1", reason="…")`."""


class LostError(EngineError):
    """The member went away while a request was open."""


class Worker(Protocol):
    """What a pool asks of a member's process or server."""

    engine: Any
    """The Engine at the other end."""
    pid: int | None
    """Of its process, where that is ours."""

    async def load(self, folder: Any, version: int) -> None:
        """Has the engine take published weights of the pool's."""
        ...

    async def ping(self) -> None:
        """Returns when its event loop answers; raises or waits when it does not."""
        ...

    async def exited(self) -> str:
        """Waits for the end of its process and says how it ended; for ever where there is none."""
        ...

    async def end(self) -> None:
        """Kills its process group, waits for that and closes what is open to it."""
        ...


class Limit:
    """How many rollouts a member may have in flight: a fixed number, or one that is found out.

    Adaptive: one group more whenever requests wait and all went well; a quarter less when a token takes twice as long
    as it did at best, half of it when the member says that it is busy.
    """

    LEAST, FIRST = 8, 64
    SLOW = 2.0

    def __init__(self, rollouts: int | None) -> None:
        self._fixed = rollouts
        self._found = float(self.FIRST)
        self._best_s: float | None = None
        """Seconds a token, of the quickest request so far."""

    @property
    def rollouts(self) -> int:
        return self._fixed if self._fixed is not None else int(self._found)

    def finished(self, seconds: float, longest: int, group: int, wanted: bool) -> None:
        """A request came back; its longest rollout has `longest` tokens. `wanted`: others wait for room."""
        a_token = seconds / max(1, longest)
        self._best_s = a_token if self._best_s is None else min(self._best_s, a_token)
        if a_token > self.SLOW * self._best_s:
            self._found = max(self.LEAST, 0.75 * self._found)
        elif wanted:
            self._found += group

    def refused(self) -> None:
        self._found = max(self.LEAST, self._found / 2)


@dataclass(eq=False)
class Member:
    """One engine of the pool."""

    name: str
    worker: Worker
    limit: Limit
    policy_version: int | None = None
    rollouts: int = 0
    """In flight."""
    finished: int = 0
    """Requests that it answered."""
    failed: int = 0
    """Requests in a row that it did not."""
    loads: int = 0
    """Rises when new weights begin to be taken and when that ends: odd in between."""
    idle_since: float = field(default_factory=monotonic)
    not_before: float = 0.0
    """It gets no request until then."""
    lost: str | None = None
    """Why it is out of service for good."""
    fault: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Set by whoever finds it broken; whoever watches it takes it out of service."""
    open: set[asyncio.Task[None]] = field(default_factory=set)
    """Its requests under way."""

    def accuse(self, reason: str) -> None:
        if not self.fault.done():
            self.fault.set_result(reason)

    async def attempt(self, work: Awaitable[Any], limit_s: float) -> Any:
        """Awaits `work`, which ends when the member is lost: `LostError`."""
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
            raise EngineError(f"no answer within {limit_s:g} s") from None
        finally:
            self.open.discard(task)
            task.cancel()


class Members:
    """Those in service."""

    def __init__(self) -> None:
        self._members: list[Member] = []
        self._waiting: deque[tuple[int, asyncio.Future[Member]]] = deque()
        self._failure: BaseException | None = None
        self.waiting_since: float | None = None
        """Since when somebody has been waiting for room."""

    def __iter__(self):
        return iter(list(self._members))

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: Member) -> None:
        self._members.append(member)
        self._hand_out()

    def remove(self, member: Member, reason: str) -> None:
        """Out of service for good; its open requests end."""
        member.lost = reason
        if member in self._members:
            self._members.remove(member)
        for task in list(member.open):
            task.cancel()

    def fail(self, error: BaseException) -> None:
        """Nobody is going to be served any more."""
        self._failure = error
        while self._waiting:
            _, place = self._waiting.popleft()
            if not place.done():
                place.set_exception(error)

    async def acquire(self, rollouts: int) -> Member:
        """The member with the fewest rollouts in flight, once one has room for so many more."""
        if self._failure is not None:
            raise self._failure
        place: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        self._waiting.append((rollouts, place))
        self._hand_out()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.release(place.result(), rollouts)
            raise

    def release(self, member: Member, rollouts: int) -> None:
        member.rollouts -= rollouts
        if member.rollouts == 0:
            member.idle_since = monotonic()
        self._hand_out()

    def rest(self, member: Member, for_s: float) -> None:
        """Nothing for it for a while."""
        member.not_before = monotonic() + for_s
        asyncio.get_running_loop().call_later(for_s, self._hand_out)

    def _hand_out(self) -> None:
        while self._waiting:
            rollouts, place = self._waiting[0]
            if not place.done():
                member = self._with_room(rollouts)
                if member is None:
                    self.waiting_since = self.waiting_since or monotonic()
                    return
                member.rollouts += rollouts
                place.set_result(member)
            self._waiting.popleft()
        self.waiting_since = None

    def _with_room(self, rollouts: int) -> Member | None:
        """A request larger than a member's limit goes to one that has nothing else to do."""
        now = monotonic()
        free = [
            member
            for member in self._members
            if now >= member.not_before
            and (member.rollouts == 0 or member.rollouts + rollouts <= member.limit.rollouts)
        ]
        return min(free, key=lambda member: member.rollouts, default=None)
