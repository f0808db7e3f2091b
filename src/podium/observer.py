"""The loops report to one object what they do. It serves timing, the event log, the watchdog and stop requests, which
are signals (`StopSignal`).

    loop ──► during("train", …), end("pack")   laps: the seconds of each stage add up to the wall time of a step
         ──► writing(groups, prompts)          the engine works until the last group; a stop request breaks this off
         ──► scored(groups)                    which prompts still wait for their rewards

The events are lines of events.jsonl: `sampling` (prompts were sent), `group` (one came back whole), `training` and
`trained`, `pushed` (an engine took new weights and proved it). Tests and people read from them what overlapped and in
which order. An observer without arguments only measures time, which is enough for a test or a simulation.
"""

import asyncio
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, suppress
from types import FrameType
from typing import Any, ClassVar, Protocol, TypeVar

from podium.errors import RunStopped
from podium.records import Batch, Group, Prompt, UpdateResult

T = TypeVar("T")

GRACE_S = 30.0
"""Seconds between a signal and the end of the process: what preemptible machines give, as Kubernetes and Slurm do."""
POLL_S = 0.1
"""Longest wait for a group before the observer asks again whether the run should stop."""
STAGES = {"eval": "evaluation"}
"""Laps that the watchdog names in full."""


class StopSignal:
    """SIGINT and SIGTERM ask the run to stop; the observer calls `requested`. After `GRACE_S` seconds, or at a second
    signal, the process ends in any case."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)
    _in_front: ClassVar["StopSignal | None"] = None
    """The one of the main thread, which waits for a run in another thread."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._over = threading.Event()

    @property
    def number(self) -> int | None:
        """The received signal; None if there was none."""
        in_front = self._in_front or self
        return in_front._number if self._number is None else self._number

    def requested(self) -> bool:
        return self.number is not None

    def __enter__(self) -> "StopSignal":
        """Python allows signal handlers only in the main thread; in other threads the main thread's handlers count."""
        is_main = threading.current_thread() is threading.main_thread()
        self._previous = {number: signal.signal(number, self._receive) for number in self.SIGNALS if is_main}
        StopSignal._in_front = self if is_main else self._in_front
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._in_front is self:
            StopSignal._in_front = None
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self._number is not None:
            self._leave(number)
        self._number = number
        os.write(2, b"\npodium: stopping at the next safe point, with a commit; a second signal stops at once\n")
        threading.Thread(target=self._wait_and_leave, args=(number,), name="grace", daemon=True).start()

    def _wait_and_leave(self, number: int) -> None:
        if not self._over.wait(GRACE_S):
            os.write(2, f"podium: the {GRACE_S:g} s to stop are over; the checkpoints stay\n".encode())
            self._leave(number)

    def _leave(self, number: int) -> None:
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\x1b[?25h")  # the live table hides the cursor
        os._exit(128 + number)


class Versioned(Protocol):
    """An engine, as the event log needs it."""

    @property
    def policy_version(self) -> int | None: ...


class Observer:
    """`stop_requested`: whether a signal asked the run to stop. `engine` and the name of its sync `channel` are for the
    event log."""

    def __init__(
        self,
        *,
        event: Callable[..., None] = lambda kind, **details: None,
        stop_requested: Callable[[], bool] | None = None,
        engine: Versioned | None = None,
        channel: str = "",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.event = event
        self._stop_requested, self._engine, self._channel = stop_requested, engine, channel
        self._now = now
        self._may_break_off = False
        self.stage, self.moved_at = "start", now()
        """What the run is doing, and when it last made progress. The watchdog reads both."""
        self.unwritten: set[int] = set()
        """Ordinals of the prompts whose rollouts are missing."""
        self.unscored: set[int] = set()
        """Ordinals of the prompts that have rollouts and no rewards yet."""
        self.num_writing = 0
        """Prompts being generated."""
        self.start_laps()

    async def run(
        self, loop: Awaitable[T], commit_last: Callable[[], Awaitable[T]], guard: AbstractContextManager[None]
    ) -> T:
        """Awaits the loop inside `guard`. If a stop request breaks sampling off, the run ends with `commit_last`, the
        commit of the last complete window."""
        with guard:
            try:
                return await loop
            except RunStopped:
                return await commit_last()

    def stop_requested(self) -> bool:
        """Whether the run should end at the next safe point."""
        return self._stop_requested is not None and self._stop_requested()

    def at(self, stage: str) -> None:
        """The run makes progress, and it is at this stage."""
        self.stage, self.moved_at = stage, self._now()

    def start_laps(self) -> None:
        """The first lap begins now; the seconds before it belong to no step."""
        self._lap_began = self._looked = self._now()
        self._laps: dict[str, float] = defaultdict(float)
        self._engine_in_lap = 0.0
        self._engine_s: dict[str, float] = defaultdict(float)
        """Seconds in which the engine was at work, by the lap in which they fell."""

    def start_window(self) -> None:
        """Until the next training step a stop request breaks sampling off: no trained step would be lost."""
        self._may_break_off = self._stop_requested is not None

    def end(self, stage: str) -> None:
        """The lap since the previous one was of this stage."""
        self._look()
        self._laps[stage] += self._looked - self._lap_began
        self._engine_s[stage] += self._engine_in_lap
        self._lap_began, self._engine_in_lap = self._looked, 0.0

    async def during(self, stage: str, work: Awaitable[T]) -> T:
        """Awaits the work of a stage; its end is the end of a lap."""
        name = STAGES.get(stage, stage)
        self.at(name)
        result = await work
        self.at(f"after {name}")
        self.end(stage)
        return result

    async def training(
        self, train: Callable[[Sequence[Batch]], Awaitable[UpdateResult]], batches: Sequence[Batch]
    ) -> UpdateResult:
        """Trains one step. From here on a stop request waits for the end of the window."""
        self._may_break_off = False
        self.event("training", batches=len(batches))
        started = self._now()
        result = await self.during("train", train(batches))
        self.event("trained", updated=result.updated, seconds=self._now() - started)
        return result

    async def pushing(self, work: Awaitable[None]) -> None:
        """Awaits a push of weights, which does nothing where the engine holds them already."""
        before, started = self._version(), self._now()
        await self.during("sync", work)
        version = self._version()
        if version != before:
            seconds = self._now() - started
            self.event("pushed", policy_version=version, channel=self._channel, seconds=seconds)

    def _version(self) -> int | None:
        return None if self._engine is None else self._engine.policy_version

    def take(self) -> dict[str, float]:
        """Seconds by stage since the last call, and how long trainer and engine worked and waited."""
        laps, engine = self._laps, self._engine_s
        self._laps, self._engine_s = defaultdict(float), defaultdict(float)
        at_work = sum(engine.values())
        sides = {
            "trainer_waits": laps.get("rollout", 0.0),
            "engine": at_work,
            "engine_waits": sum(laps.values()) - at_work,
            "overlapped": engine.get("train", 0.0),
        }
        return {**laps, **sides}

    def writing(self, groups: AsyncIterator[Group], prompts: Sequence[Prompt]) -> AsyncIterator[Group]:
        """The same groups. From this call on, the engine is counted as generating the rollouts of `prompts`.

        Raises `RunStopped` if a stop request breaks sampling off.
        """
        self._change(len(prompts))
        return self._as_they_come(groups, prompts)

    async def scored(self, groups: AsyncIterator[Group]) -> AsyncIterator[Group]:
        """The same groups, whose rewards are known. A group counts as unscored until it is passed on."""
        async for group in groups:
            self.unscored.discard(group.prompt.ordinal)
            self.moved_at = self._now()
            yield group

    async def _as_they_come(self, groups: AsyncIterator[Group], prompts: Sequence[Prompt]) -> AsyncIterator[Group]:
        missing, ordinals = len(prompts), [prompt.ordinal for prompt in prompts]
        self.at("rollout")
        self.unwritten |= set(ordinals)
        self.event("sampling", ordinals=ordinals)
        try:
            async for group in self._until_stopped(groups) if self._may_break_off else groups:
                self._change(-1)
                missing -= 1
                self._note(group)
                yield group
        finally:
            self._change(-missing)

    def _note(self, group: Group) -> None:
        """A group came back. If it has no rollouts, every attempt of the engine at this prompt failed."""
        ordinal = group.prompt.ordinal
        if group.rollouts:
            newest = max(rollout.policy_version_max for rollout in group.rollouts)
            self.event("group", ordinal=ordinal, policy_version=[group.oldest_version, newest])
        else:
            self.event("dropped_group", ordinal=ordinal, retries=group.num_retries)
        self.at("rollout and reward")
        self.unwritten.discard(ordinal)
        self.unscored.add(ordinal)

    async def _until_stopped(self, groups: Any) -> AsyncIterator[Group]:
        async with aclosing(groups):
            while (group := await self._next(groups)) is not None:
                yield group

    async def _next(self, groups: Any) -> Group | None:
        """The next group. A task of its own asks for it, and is cancelled when nothing waits for the group any more."""
        coming = asyncio.ensure_future(anext(groups, None))
        try:
            while not coming.done():
                if self._may_break_off and self.stop_requested():
                    raise RunStopped
                await asyncio.wait({coming}, timeout=POLL_S)
            return coming.result()
        finally:
            if not coming.done():
                coming.cancel()
                with suppress(asyncio.CancelledError):
                    await coming

    def _change(self, count: int) -> None:
        self._look()
        self.num_writing += count

    def _look(self) -> None:
        now = self._now()
        if self.num_writing:
            self._engine_in_lap += now - self._looked
        self._looked = now


async def eagerly(items: AsyncIterator[T]) -> AsyncIterator[T]:
    """The same items, asked for while the ones before are still being used."""
    queue: asyncio.Queue[T | None] = asyncio.Queue()

    async def ask() -> None:
        try:
            async for item in items:
                queue.put_nowait(item)
        finally:
            queue.put_nowait(None)

    asking = asyncio.create_task(ask())
    try:
        while (item := await queue.get()) is not None:
            yield item
        await asking  # raises what ended it
    finally:
        asking.cancel()
