"""Time that jumps from one event to the next, and what takes time: shared resources and busy interpreters.

Coroutines that wait on an `EventLoop` of this module see its seconds pass, though none do: whenever nothing is left to
do now, the clock is put forward to the next timer. The order of events depends on nothing but the program, so two runs
of one simulation are equal.
"""

import asyncio
import heapq
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")

SLICE_S = 0.005
"""Longest time for which an interpreter stays with one thing while others wait; CPython's switch interval."""


ROUNDING_S = 1e-12


class StuckError(RuntimeError):
    """Everybody waits and nothing is going to happen."""


class EventLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.seconds = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.seconds


class _Jump(selectors.SelectSelector):
    """Asked to wait for a while, it puts the clock forward instead; nothing comes from outside."""

    def __init__(self, loop: EventLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise StuckError("everybody waits and nothing is going to happen")
        self._loop.seconds += max(0.0, timeout)
        return []


def play(main: Coroutine[Any, Any, T]) -> T:
    """Runs it on a clock of its own."""
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        return runner.run(main)


@dataclass
class _Lot:
    """Pieces of work that are waited for together."""

    left: int
    done: asyncio.Future[None]


class Shared:
    """A resource whose users all advance at the same speed, which depends on how many they are.

    `rate(users)` is the work that each gets done in a second: `lambda users: min(1, cores / users)` for cores, tokens a
    second for rollouts of one batch. One clock of work serves all users, so a change costs a heap operation.
    """

    def __init__(self, rate: Callable[[int], float]) -> None:
        self._rate, self._loop = rate, asyncio.get_running_loop()
        self._ends: list[tuple[float, int, _Lot]] = []
        self._number = count()
        self._timer: asyncio.TimerHandle | None = None
        self._work, self._looked = 0.0, self._loop.time()
        self._busy_s = self._user_s = 0.0

    async def use(self, *works: float) -> None:
        """Returns when the last of these pieces of work is done."""
        self._look()
        lot = _Lot(len(works), self._loop.create_future())
        for work in works:
            heapq.heappush(self._ends, (self._work + work, next(self._number), lot))
        self._set_timer()
        await lot.done

    @property
    def busy_s(self) -> float:
        """Seconds in which there was a user."""
        self._look()
        return self._busy_s

    @property
    def user_s(self) -> float:
        """Seconds times users."""
        self._look()
        return self._user_s

    def _look(self) -> None:
        now, users = self._loop.time(), len(self._ends)
        if users and now > self._looked:
            passed = now - self._looked
            self._work += passed * self._rate(users)
            self._busy_s += passed
            self._user_s += passed * users
        self._looked = now

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._ends:
            left = max(0.0, self._ends[0][0] - self._work)
            self._timer = self._loop.call_later(left / self._rate(len(self._ends)), self._end)

    def _end(self) -> None:
        """The next piece of work is done, and those that end with it but for rounding."""
        self._look()
        self._work = max(self._work, self._ends[0][0])
        while self._ends and self._ends[0][0] <= self._work:
            _, _, lot = heapq.heappop(self._ends)
            lot.left -= 1
            if not lot.left and not lot.done.done():
                lot.done.set_result(None)
        self._timer = None
        self._set_timer()


@dataclass(eq=False)
class _User:
    session: str
    work: float
    """Seconds of a core that are left."""
    done: asyncio.Future[None]
    rate: float = 0.0


class Cores:
    """Cores as Linux deals them out: equally to the sessions that want them, and in a session equally to its processes,
    of which each has use for one core. `others` sessions want as much as they can get, all the time."""

    def __init__(self, cores: float, others: float = 0.0) -> None:
        self._cores, self._others, self._loop = cores, others, asyncio.get_running_loop()
        self._users: list[_User] = []
        self._looked = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    async def use(self, session: str, seconds: float) -> None:
        self._look()
        user = _User(session, seconds, self._loop.create_future())
        self._users.append(user)
        self._deal()
        await user.done

    def _look(self) -> None:
        now = self._loop.time()
        for user in self._users:
            user.work -= (now - self._looked) * user.rate
        self._looked = now

    def _deal(self) -> None:
        """Sessions with the fewest processes first: what they have no use for is left to the others."""
        sizes = Counter(user.session for user in self._users)
        left, sessions, shares = self._cores, len(sizes) + self._others, {}
        for session, processes in sorted(sizes.items(), key=lambda item: item[1]):
            shares[session] = min(float(processes), left / sessions)
            left, sessions = left - shares[session], sessions - 1
        for user in self._users:
            user.rate = shares[user.session] / sizes[user.session]
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._users:
            first = min(max(0.0, user.work) / user.rate for user in self._users)
            self._timer = self._loop.call_later(first, self._end)

    def _end(self) -> None:
        self._look()
        least = max(0.0, min(user.work for user in self._users)) + ROUNDING_S
        for user in [user for user in self._users if user.work <= least]:
            self._users.remove(user)
            if not user.done.done():
                user.done.set_result(None)
        self._deal()


class Interpreter:
    """A process whose threads take turns, as Python's do: one core at most, a slice each, first come, first served."""

    def __init__(self, cores: Cores | None = None, session: str = "", slice_s: float = SLICE_S) -> None:
        """Without `cores` it has one to itself."""
        self._cores, self._session, self._slice_s = cores, session, slice_s
        self._turn = asyncio.Lock()
        self.busy_s = 0.0

    async def use(self, seconds: float) -> None:
        """`seconds` of one core."""
        while seconds > 0:
            async with self._turn:
                part = min(seconds, self._slice_s)
                await (asyncio.sleep(part) if self._cores is None else self._cores.use(self._session, part))
            self.busy_s += part
            seconds -= part
