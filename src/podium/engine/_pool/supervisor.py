"""Who is in the pool: members are started, proven, watched, replaced, added and retired.

A seat is a place in the pool: a local process, or a server. Whoever sits there has taken the current weights, confirmed
by version and sha256, and scores a probe as the others do, before it serves. A seat whose member is lost gets another;
one whose starts fail too often in a row is given up, and with too few seats or members left the pool fails.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from podium.engine._pool.health import Pulse, lost
from podium.engine._pool.members import Limit, Member, Members, OnEvent, Worker
from podium.errors import EngineError, InputError, PodiumError, WeightsError
from podium.model.agreement import allowed_gap, mean_gap
from podium.model.evidence import Held, is_among

TICK_S = 0.25
SCALE_UP_S = 1.0
"""Requests have waited for room for so long: one member more."""
BACK_OFF_S, LONGEST_BACK_OFF_S = 0.5, 5.0


class Launch(Protocol):
    """Starts what a seat is for."""

    async def __call__(self, name: str) -> Worker: ...


@dataclass(frozen=True)
class Rules:
    """When members come and go."""

    replicas: tuple[int, int]
    """Of local members."""
    floor: int
    max_restarts: int
    start_s: float
    recovery_s: float
    idle_s: float
    tolerance: float = 0.0
    """Of a new member's probe, on average, from the others'."""
    name: str = "worker"
    """Of local members, with a number behind it."""
    kind: str = "engines"
    """What members are, for people."""
    floor_name: str = "engine.floor"


@dataclass(frozen=True)
class Weights:
    """What members hold, or should; none where members need none."""

    folder: Any
    """Where they are, as a worker's `load` takes it."""
    version: int


@dataclass(eq=False)
class Seat:
    """`name` is for people: worker-1, or an address."""

    name: str
    launch: Launch
    is_local: bool
    member: Member | None = None
    task: asyncio.Task[None] | None = None
    started: int = 0
    """Members so far."""
    failed_starts: int = 0
    """In a row."""
    setbacks: int = 0
    """Members in a row that were lost without having answered anything."""
    last_problem: str = ""
    given_up: bool = False
    retiring: bool = False

    @property
    def was_tried(self) -> bool:
        return self.member is not None or self.started > 1 or self.given_up or self.failed_starts > 0


@dataclass
class Probe:
    """What members of a version answer to fixed tokens."""

    version: int
    token_ids: list[int]
    logprobs: list[float]
    shown: tuple[Held, ...] = ()
    """What those members hold."""


class Supervisor:
    def __init__(
        self, members: Members, rules: Rules, pulse: Pulse, new_limit: Callable[[], Limit], on_event: OnEvent
    ) -> None:
        self._members, self.rules, self._pulse = members, rules, pulse
        self._new_limit, self._on_event = new_limit, on_event
        self.seats: list[Seat] = []
        self._launch: Launch | None = None
        self._named = 0
        self.weights: Weights | None = None
        self._probe: Probe | None = None
        self._shown: tuple[Held, ...] = ()
        self._pushing = asyncio.Lock()
        self._tending: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self._short_since: float | None = None
        self.failure: PodiumError | None = None

    def start(self, local: Launch | None, servers: Sequence[tuple[str, Launch]]) -> None:
        """Fills every seat; the first weights have to be known."""
        self._launch = local
        if local is not None:
            for _ in range(self.rules.replicas[0]):
                self._add_seat()
        for name, launch in servers:
            self._take(Seat(name, launch, is_local=False))
        self._tending = asyncio.create_task(self._tend())
        self._tending.add_done_callback(self._broke)

    async def close(self) -> None:
        tasks = [task for task in (self._tending, *(seat.task for seat in self.seats)) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def push(self, weights: Weights, begin: Callable[[], None]) -> None:
        """Every member takes the weights or is out of service; raises unless enough have them."""
        async with self._pushing:
            self.raise_failure()
            before, self.weights = self.weights, weights
            if before is None:
                begin()
            elif not await self._tell(list(self._members), weights):
                self.weights = before  # the folder was refused by all: they go on with what they have
                raise WeightsError(f"no member took version {weights.version}: {self._problems()}")
            if before is None:
                await self._until(lambda: all(seat.was_tried for seat in self.seats))
            await self._until(lambda: self._num_proven(weights.version) >= self.rules.floor)

    async def score_each(self, token_ids: list[int]) -> dict[str, list[float]]:
        """By every member in service, those who come meanwhile too; remembered, for those who come later."""
        assert self.weights is not None
        version = self.weights.version
        scores = await self._ask_each(lambda engine: engine.score(token_ids), "score the probe")
        self._probe = Probe(version, token_ids, next(iter(scores.values())), self._shown)
        return scores

    async def held_each(self) -> dict[str, Held | None]:
        """What every member in service samples with; remembered, for those who come later."""
        held = await self._ask_each(lambda engine: engine.held(), "show its weights")
        self._shown = tuple(each for each in held.values() if each is not None)
        return held

    async def _ask_each(self, ask: Callable[[Any], Awaitable[Any]], what: str) -> dict[str, Any]:
        """One that cannot answer is out of service."""
        self.raise_failure()
        answers: dict[str, Any] = {}
        await self._until(lambda: len(self._members) > 0)
        while asked := [member for member in self._members if member.name not in answers]:
            found = await asyncio.gather(*(self._ask(member, ask, what) for member in asked))
            answers |= {member.name: given[0] for member, given in zip(asked, found, strict=True) if given}
            if not answers:  # those who were asked may all be lost on the way
                await self._until(lambda: len(self._members) > 0)
        return answers

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    async def _ask(self, member: Member, ask: Callable[[Any], Awaitable[Any]], what: str) -> list[Any]:
        """Its answer; none where it could not give one."""
        try:
            return [await member.attempt(ask(member.worker.engine), self.rules.start_s)]
        except InputError:
            raise
        except (EngineError, OSError) as error:
            member.accuse(f"could not {what}: {error}")
            self._members.remove(member, f"could not {what}: {error}")
            return []

    async def _tell(self, members: Sequence[Member], weights: Weights) -> bool:
        """Whether the push stands; members that did not confirm it while others did are accused."""
        problems = await asyncio.gather(*(self._load(member, weights) for member in members))
        refused = {member: error for member, error in zip(members, problems, strict=True) if error is not None}
        if members and len(refused) == len(members) and all(isinstance(e, WeightsError) for e in refused.values()):
            for seat in self.seats:
                if seat.member in refused:
                    seat.last_problem = str(refused[seat.member])
            return False
        for member, error in refused.items():
            member.accuse(f"did not take version {weights.version}: {error}")
            self._members.remove(member, f"did not take version {weights.version}: {error}")
        return True

    async def _load(self, member: Member, weights: Weights) -> Exception | None:
        member.loads += 1
        try:
            await member.attempt(member.worker.load(weights.folder, weights.version), self.rules.start_s)
            confirmed = member.worker.engine.policy_version
            if confirmed != weights.version:
                return EngineError(f"it says that it holds version {confirmed}")
        except (PodiumError, OSError) as error:
            return error
        finally:
            member.loads += 1
        member.policy_version = weights.version
        return None

    def _add_seat(self) -> None:
        assert self._launch is not None
        self._named += 1
        self._take(Seat(f"{self.rules.name}-{self._named}", self._launch, is_local=True))

    def _take(self, seat: Seat) -> None:
        self.seats.append(seat)
        seat.task = asyncio.create_task(self._keep(seat))
        seat.task.add_done_callback(self._broke)

    def _broke(self, task: asyncio.Task[None]) -> None:
        """A mistake in the pool itself must not leave a place empty in silence."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = EngineError(f"the pool itself failed: {type(error).__name__}: {error}")
            self._members.fail(self.failure)

    async def _keep(self, seat: Seat) -> None:
        """The life of a seat: one member after the other."""
        while not seat.retiring:
            member = await self._seated(seat)
            if member is None:
                seat.failed_starts += 1
                await self._notify()
                if seat.is_local and seat.failed_starts > self.rules.max_restarts:
                    seat.given_up = True
                    self._on_event("seat_given_up", worker=seat.name, reason=seat.last_problem)
                    await self._notify()
                    return
            else:
                seat.failed_starts = 0
                reason = await self._serve(seat, member)
                seat.setbacks = 0 if member.finished else seat.setbacks + 1
                seat.last_problem = reason
            worst = max(seat.failed_starts, seat.setbacks - 1)
            await asyncio.sleep(min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2 ** (worst - 1)) if worst > 0 else 0)
        self.seats.remove(seat)

    async def _seated(self, seat: Seat) -> Member | None:
        """A member that has been started and proven; None if that failed."""
        seat.started += 1
        began, worker = monotonic(), None
        try:
            async with asyncio.timeout(self.rules.start_s):
                worker = await seat.launch(f"{seat.name}.{seat.started}")
                member = Member(
                    f"{seat.name}.{seat.started}" if seat.is_local else seat.name, worker, self._new_limit()
                )
                await self._prove(member)
        except BaseException as error:
            if worker is not None:
                await worker.end()
            if not isinstance(error, (PodiumError, OSError, TimeoutError)):
                raise
            if isinstance(error, InputError):  # another start would not help
                self.failure = error
            took_long = isinstance(error, TimeoutError)
            seat.last_problem = f"not ready within {self.rules.start_s:g} s" if took_long else str(error)
            self._on_event("start_failed", worker=seat.name, reason=seat.last_problem)
            return None
        self._members.add(member)
        seat.member = member
        self._on_event(
            "worker_started",
            worker=member.name,
            pid=worker.pid,
            policy_version=member.policy_version,
            seconds=monotonic() - began,
            members=len(self._members),
        )
        await self._notify()
        return member

    async def _prove(self, member: Member) -> None:
        """The current weights, and the same logprobs as the others where they are known; again if they changed."""
        proven: tuple[Weights | None, Probe | None] = (None, None)
        while proven != (self.weights, self._probe):
            weights, probe = self.weights, self._probe
            assert weights is not None
            if member.policy_version != weights.version and (problem := await self._load(member, weights)):
                if weights is not self.weights:
                    continue  # they were replaced meanwhile, and their folder is gone
                raise EngineError(f"{member.name} did not take version {weights.version}: {problem}")
            if probe is not None and probe.version == weights.version:
                if probe.shown and not is_among(await member.worker.engine.held(), probe.shown):
                    raise EngineError(
                        f"{member.name} says that it holds version {weights.version}, but it does not hold the weights "
                        "that the others hold"
                    )
                found = await member.worker.engine.score(probe.token_ids)
                gap = mean_gap(found, probe.logprobs)
                if not gap <= allowed_gap(self.rules.tolerance, probe.logprobs):
                    raise EngineError(
                        f"{member.name} says that it holds version {weights.version}, but its logprobs differ from "
                        f"the others' by {gap:.2e} on average"
                    )
            proven = (weights, probe)

    async def _serve(self, seat: Seat, member: Member) -> str:
        """Until it is lost or retired; why."""
        reason = ""
        try:
            reason = await lost(member, self._pulse)
        finally:
            self._members.remove(member, reason or "the pool closed")
            seat.member = None
            if reason and not seat.retiring:
                self._on_event("worker_lost", worker=member.name, reason=reason, members=len(self._members))
            with suppress(OSError, PodiumError):
                await asyncio.shield(member.worker.end())
        await self._notify()
        return reason

    async def _tend(self) -> None:
        """Few enough decisions to take them a few times a second."""
        while self.failure is None:
            await asyncio.sleep(TICK_S)
            self._check_floor()
            if self._launch is not None:
                self._scale()
        self._members.fail(self.failure)
        await self._notify()

    def _check_floor(self) -> None:
        floor, rules = self.rules.floor, self.rules
        if self._num_open() < floor:
            self.failure = EngineError(
                f"{self._num_open()} of the pool's {rules.kind} are left and {rules.floor_name} = {floor}; "
                f"{self._problems()}"
            )
        elif len(self._members) >= floor:
            self._short_since = None
        else:
            self._short_since = self._short_since or monotonic()
            limit = rules.recovery_s if any(seat.started > 1 for seat in self.seats) else rules.start_s
            if monotonic() - self._short_since > limit:
                self.failure = EngineError(
                    f"the pool had fewer than {floor} {rules.kind} in service for {limit:g} s; {self._problems()}"
                )

    def _scale(self) -> None:
        least, most = self.rules.replicas
        local = [seat for seat in self.seats if seat.is_local and not seat.retiring and not seat.given_up]
        waiting = self._members.waiting_since
        if waiting is not None and monotonic() - waiting > SCALE_UP_S:
            if len(local) < most and all(seat.member is not None for seat in local):
                self._add_seat()
                self._on_event("scaled", members=len(local) + 1, before=len(local), reason="requests wait for room")
            return
        idle = [seat for seat in local if seat.member is not None and seat.member.rollouts == 0]
        longest = min(idle, key=lambda seat: seat.member.idle_since, default=None)  # type: ignore[union-attr]
        if len(local) > least and longest is not None and longest.member is not None:
            for_s = monotonic() - longest.member.idle_since
            if for_s > self.rules.idle_s:
                longest.retiring = True
                longest.member.accuse(f"retired: idle for {for_s:.0f} s")
                self._on_event("scaled", members=len(local) - 1, before=len(local), reason=f"idle for {for_s:.0f} s")

    def _num_open(self) -> int:
        return sum(not seat.given_up and not seat.retiring for seat in self.seats)

    def _num_proven(self, version: int) -> int:
        return sum(member.policy_version == version for member in self._members)

    def _problems(self) -> str:
        return "; ".join(f"{seat.name}: {seat.last_problem}" for seat in self.seats if seat.last_problem) or "no reason"

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Ends with the pool's failure, which comes within its deadlines."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.failure is not None or holds())
        self.raise_failure()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
