"""A pool of workers: it starts, prepares, watches, replaces, adds and retires them, and sends them work.

    launch(name) ──► worker ──► prepare(member) ──► in service ──► lost or retired ──► end
         ▲                                               │                              │
         └──────────── the replica's next member ◄───────┼──────────────────────────────┘
                                        send, ask_each ──┘

Workers may be local processes, HTTP servers or Ray actors. The pool does not know what they compute: its caller says
how a worker starts, how it is prepared, and what it is asked. A replica is one place in the pool (worker-1) with one
member after the other (worker-1.1, worker-1.2). A replica whose starts fail too often in a row is given up. With too
few replicas or members left, the pool fails.

Work has a size. It goes to the member with the least work in flight that has room for it; work that has waited longest
goes first. When a member is lost, its open requests end at once. A member is lost by any of three signs. Its process
ends. Its event loop does not answer several pings in a row. The caller's own `watch` returns.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

from podium.errors import BusyError, InputError, PodiumError, WorkerError
from podium.remote.tasks import Changes, end_tasks

TICK_S = 0.25
SCALE_UP_S = 1.0
"""A member is added when work has waited for room for so long."""
BACK_OFF_S, LONGEST_BACK_OFF_S = 0.5, 5.0
REST_S = 0.5
"""A member that is busy, or failed a request, gets no work for so long. By then the pool knows whether it is dead."""
MAX_FAILED = 3
"""Requests in a row that a member may fail before it is replaced."""
IDLE_S = 60.0
MISSES = 3
"""Missed answers in a row before a member counts as frozen."""
PING_PAUSE_S = 0.5
LATE_S = 0.5
"""If a wait took so much longer than its limit, this process was late, not the member."""
DEATH_S = 0.3
"""The requests of a dying process fail a moment before its end is known."""

T = TypeVar("T")
Launch = Callable[[str], Awaitable["Worker"]]
"""Starts the worker of a replica, by its name."""
OnEvent = Callable[..., None]
"""Receives what happened: `on_event("worker_lost", worker="worker-1.1", reason="…")`."""


class RetriesError(WorkerError):
    """Every member that was given the work failed at it."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


@dataclass(frozen=True)
class Rules:
    """When members come and go, and how long the pool waits for them."""

    replicas: tuple[int, int]
    """Fewest and most replicas that the pool starts itself."""
    floor: int
    """Fewest members that must be in service."""
    max_restarts: int
    """Starts in a row that may fail in one replica."""
    start_s: float
    """For a worker to start and be prepared, and to answer a broadcast."""
    recovery_s: float
    """With fewer than `floor` members, or all of them busy, for so long, the pool fails."""
    frozen_s: float
    """A member whose event loop is silent for so long is replaced."""
    request_s: float = 3600.0
    """For one request."""
    idle_s: float = IDLE_S
    """After which spare members are retired."""
    max_redispatches: int = 5
    """How often work is sent again after a member failed at it."""
    name: str = "worker"
    """Of replicas, followed by a number."""
    kind: str = "workers"
    """What members are, in messages."""
    floor_name: str = "the fewest"
    """The name of `floor` in messages."""
    error: type[PodiumError] = WorkerError
    """Raised when the pool fails."""


class Worker(Protocol):
    """What a pool asks of a process, server or actor."""

    pid: int | None
    """Of its process, if that process belongs to the run."""

    async def ping(self) -> None:
        """Returns when its event loop answers; otherwise raises or waits."""
        ...

    async def exited(self) -> str:
        """Waits for the end of its process and says how it ended. Waits forever for a server."""
        ...

    async def end(self) -> None:
        """Kills its process group, waits for that and closes the connections to it."""
        ...


class Limit:
    """How much work a member may have in flight: a fixed size, or one that adapts.

    An adaptive limit grows by one request when a request ends well while others wait. It falls by a quarter when a unit
    of work takes twice as long as the fastest one, and by half when the member says that it is busy.
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
    """A worker in the pool."""

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
    """Until then it gets no request."""
    lost: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Why it is out of service; set once. The pool then ends and replaces the member."""

    def mark_lost(self, reason: str) -> None:
        """Also ends its open requests."""
        if not self.lost.done():
            self.lost.set_result(reason)

    def has_room(self, size: int) -> bool:
        """Work larger than the limit goes to a member that has no other work."""
        is_free = self.num_in_flight == 0 or self.num_in_flight + size <= self.limit.size
        return is_free and not self.lost.done() and monotonic() >= self.not_before

    async def attempt(self, work: Awaitable[T], limit_s: float) -> T:
        """Awaits `work`. Raises `WorkerError` as soon as the member is lost."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self.lost}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise WorkerError(self.lost.result() if self.lost.done() else f"no answer within {limit_s:g} s")
        except TimeoutError as error:
            raise WorkerError(f"no answer in time: {error}") from None
        finally:
            task.cancel()  # not waited for: what it cleans up may take longer than the limit
            task.add_done_callback(lambda done: done.cancelled() or done.exception())


M = TypeVar("M", bound=Member[Any])


@dataclass(eq=False)
class Replica(Generic[M]):
    """One place in the pool. Its name is for people: worker-1, or an address."""

    name: str
    launch: Launch
    is_local: bool
    """Whether the pool starts and retires its workers; False for a server that others started."""
    member: M | None = None
    task: asyncio.Task[None] | None = None
    started: int = 0
    """Members so far."""
    failed_starts: int = 0
    """In a row."""
    setbacks: int = 0
    """Members in a row that were lost before they answered anything."""
    last_problem: str = ""
    given_up: bool = False
    retiring: bool = False

    @property
    def was_tried(self) -> bool:
        return self.member is not None or self.started > 1 or self.failed_starts > 0


class Pool(Generic[M]):
    """Lives in one event loop."""

    def __init__(
        self,
        rules: Rules,
        new_member: Callable[[str, Any], M],
        prepare: Callable[[M], Awaitable[Mapping[str, Any]]],
        on_event: OnEvent,
        watch: Callable[[M], Awaitable[str]] | None = None,
    ) -> None:
        """`new_member` takes a name and a worker. `prepare` makes a member ready to serve, or raises; the event
        `worker_started` contains what it returns. `watch` returns a reason once a member does not work any more."""
        self.rules, self.replicas = rules, list[Replica[M]]()
        self.failure: PodiumError | None = None
        self.waiting_since: float | None = None
        """Since when work has been waiting for room."""
        self._num_waiting = 0
        self._turn, self._changes = asyncio.Lock(), Changes()
        self._new_member, self._prepare, self._watch, self._on_event = new_member, prepare, watch, on_event
        self._launch: Launch | None = None
        self._named = 0
        self._supervision: asyncio.Task[None] | None = None
        self._short_since: float | None = None

    def start(self, launch: Launch | None, servers: Iterable[tuple[str, Launch]] = ()) -> None:
        """Fills every replica: those that `launch` starts, and servers, by address, that run already."""
        self._launch = launch
        if launch is not None:
            for _ in range(self.rules.replicas[0]):
                self._add_replica()
        for name, connect in servers:
            self._fill(Replica(name, connect, is_local=False))
        self._supervision = asyncio.create_task(self._supervise())
        self._supervision.add_done_callback(self._broke)

    @property
    def members(self) -> list[M]:
        """Those in service."""
        found = [replica.member for replica in self.replicas if replica.member is not None]
        return [member for member in found if not member.lost.done()]

    async def close(self) -> None:
        tasks = (self._supervision, *(each.task for each in self.replicas))
        await end_tasks(task for task in tasks if task is not None)

    async def send(
        self,
        size: Callable[[], int],
        work: Callable[[M], Awaitable[T]],
        details: Callable[[], Mapping[str, Any]],
        first: M | None = None,
    ) -> T:
        """Gives the work to the member with the least in flight; if that member is lost or fails, to another.

        `size` is what is left of the work and counts against a member's limit; work that shrinks meanwhile releases the
        difference itself. `first` gets the work if it has room. `details` are added to the event `redispatched`. Raises
        `RetriesError` when too many members failed.
        """
        rules, reasons = self.rules, list[str]()
        busy_until: float | None = None
        while len(reasons) <= rules.max_redispatches:
            member = await self._acquire(size(), first)
            try:
                answer = await member.attempt(work(member), rules.request_s)
            except BusyError as error:
                busy_until = busy_until or monotonic() + rules.recovery_s
                if monotonic() > busy_until:
                    raise rules.error(f"{member.name} has been busy for {rules.recovery_s:g} s") from error
                member.limit.refused()
                self._rest(member)
            except WorkerError as error:
                reasons.append(f"{member.name}: {error}")
                self._rest(member)
                member.failed += 1
                if member.failed >= MAX_FAILED:
                    member.mark_lost(f"{member.failed} requests in a row failed, the last one: {reasons[-1]}")
                if len(reasons) <= rules.max_redispatches:
                    self._on_event("redispatched", worker=member.name, **details(), reason=reasons[-1])
            else:
                member.failed, member.finished = 0, member.finished + 1
                return answer
            finally:
                self.release(member, size())
        raise RetriesError(reasons)

    def release(self, member: M, size: int) -> None:
        """So much of the member's work has ended."""
        member.num_in_flight -= size
        if member.num_in_flight == 0:
            member.idle_since = monotonic()
        self._changes.notify()

    async def broadcast(self, members: Sequence[M], call: Callable[[M], Awaitable[T]]) -> dict[M, T | Exception]:
        """Calls all `members` at the same time; the answer of a member that fails is its error."""

        async def ask(member: M) -> T | Exception:
            try:
                return await member.attempt(call(member), self.rules.start_s)
            except (PodiumError, OSError) as error:
                return error

        return dict(zip(members, await asyncio.gather(*map(ask, members)), strict=True))

    async def ask_each(self, ask: Callable[[M], Awaitable[T]], what: str) -> dict[str, T]:
        """What each member in service answers, by name; members that join meanwhile are asked too. A member that fails
        to answer is replaced."""
        answers: dict[str, T] = {}
        await self.until(lambda: self.members)
        while asked := [member for member in self.members if member.name not in answers]:
            for member, answer in (await self.broadcast(asked, ask)).items():
                if isinstance(answer, InputError):
                    raise answer
                if isinstance(answer, Exception):
                    member.mark_lost(f"could not {what}: {answer}")
                else:
                    answers[member.name] = answer
            if not answers:  # all members that were asked may be lost
                await self.until(lambda: self.members)
        return answers

    async def until(self, holds: Callable[[], Any]) -> None:
        """Waits until `holds`. Raises the pool's failure, which comes within the limits of the rules."""
        await self._changes.until(lambda: self.failure is not None or holds())
        if self.failure is not None:
            raise self.failure

    def problems(self) -> str:
        """The last problem of each replica, for people."""
        found = [f"{replica.name}: {replica.last_problem}" for replica in self.replicas if replica.last_problem]
        return "; ".join(found) or "no reason"

    async def _acquire(self, size: int, first: M | None) -> M:
        """`first` if it has room for work of this size; else the member with the least work in flight, once one has
        room."""
        self._num_waiting += 1
        try:
            async with self._turn:  # the call that has waited longest is next
                member = await self._changes.until(lambda: self._with_room(size, first))
                assert member is not None
                member.num_in_flight += size
                return member
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self.waiting_since = None

    def _with_room(self, size: int, first: M | None = None) -> M | None:
        if self.failure is not None:
            raise self.failure
        free = [member for member in self.members if member.has_room(size)]
        if not free:
            self.waiting_since = self.waiting_since or monotonic()
        return first if first in free else min(free, key=lambda member: member.num_in_flight, default=None)

    def _rest(self, member: M) -> None:
        """Gives the member no new work for a while."""
        member.not_before = monotonic() + REST_S
        asyncio.get_running_loop().call_later(REST_S, self._changes.notify)

    def _fail(self, error: PodiumError) -> None:
        """Raises `error` in everything that waits for the pool, now or later."""
        self.failure = error
        self._changes.notify()

    def _add_replica(self) -> None:
        assert self._launch is not None
        self._named += 1
        self._fill(Replica(f"{self.rules.name}-{self._named}", self._launch, is_local=True))

    def _fill(self, replica: Replica[M]) -> None:
        self.replicas.append(replica)
        replica.task = asyncio.create_task(self._run(replica))
        replica.task.add_done_callback(self._broke)

    def _broke(self, task: asyncio.Task[None]) -> None:
        """Without this, a defect of the pool itself would leave a replica empty in silence."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(self.rules.error(f"the pool itself failed: {type(error).__name__}: {error}"))

    async def _run(self, replica: Replica[M]) -> None:
        """The life of a replica: one member after the other."""
        while not replica.retiring:
            member = await self._start_member(replica)
            if member is None:
                replica.failed_starts += 1
                replica.given_up = replica.is_local and replica.failed_starts > self.rules.max_restarts
                self._changes.notify()
                if replica.given_up:
                    self._on_event("seat_given_up", worker=replica.name, reason=replica.last_problem)
                    return
            else:
                replica.failed_starts = 0
                replica.last_problem = await self._until_lost(replica, member)
                replica.setbacks = 0 if member.finished else replica.setbacks + 1
            worst = max(replica.failed_starts, replica.setbacks - 1)
            await asyncio.sleep(min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2 ** (worst - 1)) if worst > 0 else 0)
        self.replicas.remove(replica)

    async def _start_member(self, replica: Replica[M]) -> M | None:
        """A member that has been started and prepared; None if that failed."""
        replica.started += 1
        name = f"{replica.name}.{replica.started}"
        began, worker = monotonic(), None
        try:
            async with asyncio.timeout(self.rules.start_s):
                worker = await replica.launch(name)
                member = self._new_member(name if replica.is_local else replica.name, worker)
                details = await self._prepare(member)
        except BaseException as error:
            if worker is not None:
                await worker.end()
            if not isinstance(error, (PodiumError, OSError, TimeoutError)):
                raise
            if isinstance(error, InputError):  # another start would not help
                self._fail(error)
            took_long = isinstance(error, TimeoutError)
            replica.last_problem = f"not ready within {self.rules.start_s:g} s" if took_long else str(error)
            self._on_event("start_failed", worker=replica.name, reason=replica.last_problem)
            return None
        replica.member = member
        self._changes.notify()
        seconds, members = monotonic() - began, len(self.members)
        self._on_event(
            "worker_started", worker=member.name, pid=worker.pid, **details, seconds=seconds, members=members
        )
        return member

    async def _until_lost(self, replica: Replica[M], member: M) -> str:
        """Waits until the member is lost or retired, and ends it; why."""
        reason = ""
        try:
            reason = await self._lost(member)
        finally:
            member.mark_lost(reason or "the pool closed")
            replica.member = None
            if reason and not replica.retiring:
                self._on_event("worker_lost", worker=member.name, reason=reason, members=len(self.members))
            with suppress(OSError, PodiumError):
                await asyncio.shield(member.worker.end())
        return reason

    async def _lost(self, member: M) -> str:
        """Waits until the member is lost and says why. The end of its process causes the other signs, so it is named
        first."""
        ending = asyncio.ensure_future(member.worker.exited())
        signs = [frozen(member.worker, self.rules.frozen_s), asyncio.shield(member.lost)]
        if self._watch is not None:
            signs.append(self._watch(member))
        tasks = {ending, *map(asyncio.ensure_future, signs)}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                await asyncio.wait({ending}, timeout=DEATH_S)
            sign = ending if ending.done() else done.pop()
            return sign.result()
        finally:
            await end_tasks(tasks)

    async def _supervise(self) -> None:
        while self.failure is None:
            await asyncio.sleep(TICK_S)
            self._check_floor()
            if self._launch is not None:
                self._scale()

    def _check_floor(self) -> None:
        floor, rules, problem = self.rules.floor, self.rules, ""
        num_open = sum(not replica.given_up and not replica.retiring for replica in self.replicas)
        if num_open < floor:
            problem = f"{num_open} of the pool's {rules.kind} are left and {rules.floor_name} = {floor}"
        elif len(self.members) >= floor:
            self._short_since = None
        else:
            self._short_since = self._short_since or monotonic()
            limit = rules.recovery_s if any(replica.started > 1 for replica in self.replicas) else rules.start_s
            if monotonic() - self._short_since > limit:
                problem = f"the pool had fewer than {floor} {rules.kind} in service for {limit:g} s"
        if problem:
            self._fail(rules.error(f"{problem}; {self.problems()}"))

    def _scale(self) -> None:
        least, most = self.rules.replicas
        local = [each for each in self.replicas if each.is_local and not each.retiring and not each.given_up]
        if self.waiting_since is not None and monotonic() - self.waiting_since > SCALE_UP_S:
            if len(local) < most and all(replica.member is not None for replica in local):
                self._add_replica()
                self._on_event("scaled", members=len(local) + 1, before=len(local), reason="requests wait for room")
            return
        idle = [(each, each.member) for each in local if each.member is not None and each.member.num_in_flight == 0]
        if len(local) > least and idle:
            replica, member = min(idle, key=lambda each: each[1].idle_since)
            for_s = monotonic() - member.idle_since
            if for_s > self.rules.idle_s:
                replica.retiring = True
                member.mark_lost(f"retired: idle for {for_s:.0f} s")
                self._on_event("scaled", members=len(local) - 1, before=len(local), reason=f"idle for {for_s:.0f} s")


async def frozen(worker: Worker, limit_s: float) -> str:
    """Returns once the worker's event loop has been silent for about `limit_s`."""
    allowed, misses = limit_s / MISSES, 0
    while misses < MISSES:
        asked = monotonic()
        try:
            async with asyncio.timeout(allowed):
                await worker.ping()
            misses = 0
            await asyncio.sleep(PING_PAUSE_S)
        except (TimeoutError, OSError, PodiumError) as error:
            took = monotonic() - asked
            misses += took < allowed + LATE_S
            if not isinstance(error, TimeoutError):
                await asyncio.sleep(max(0.0, allowed - took))
    return f"frozen: no sign of life for {limit_s:g} s"
