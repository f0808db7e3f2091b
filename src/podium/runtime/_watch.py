"""A watchdog on progress: what the run waits for, for how long, and what happens when nothing moves.

Progress is a group that arrives or is scored, a step, a push, a commit: not that a process is alive. After
`max_stall_s` without any, the stacks of all threads go to stacks.txt, the stage and the prompts still out are named,
and the run is ended with a `NoProgressError`. If even that does not come through (a thread that nothing can stop),
the process ends itself. What was committed stays.
"""

import asyncio
import faulthandler
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

from podium.errors import NoProgressError
from podium.records import Group, Prompt
from podium.run_folder import RunFolder
from podium.runtime._around import Around
from podium.stages import Stages

T = TypeVar("T")

LAST_S = 20.0
"""Given to a run that was told to end, before its process is ended."""
GIL_S = 30.0
"""On top of the stall: then something holds the interpreter itself, and a thread of C ends the process."""
SHOWN = 20

stalled = False
"""Whether a run of this process was ended so; then a thread may hang that Python would wait for at exit."""


class Watch:
    def __init__(self, folder: RunFolder, max_stall_s: float) -> None:
        self._folder, self._max_stall_s = folder, max_stall_s
        self._stage, self._last = "start", time.monotonic()
        self._unwritten: set[int] = set()
        self._unscored: set[int] = set()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.complaint: str | None = None

    def at(self, stage: str) -> None:
        """The run has come to this stage."""
        self._stage, self._last = stage, time.monotonic()

    def sent(self, ordinals: Sequence[int]) -> None:
        self.at("rollout")
        self._unwritten |= set(ordinals)

    def written(self, ordinal: int) -> None:
        self.at("rollout and reward")
        self._unwritten.discard(ordinal)
        self._unscored.add(ordinal)

    def scored(self, ordinal: int) -> None:
        self._unscored.discard(ordinal)
        self._last = time.monotonic()

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Around a running loop, in its task; ends only when whatever that task left behind has ended too."""
        self._last, self._over = time.monotonic(), threading.Event()
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._thread = threading.Thread(target=self._look, args=(loop, task), name="watchdog", daemon=True)
        self._thread.start()
        try:
            yield
        except asyncio.CancelledError:
            if self.complaint is None:
                raise
            raise NoProgressError(self.complaint) from None

    def end(self) -> None:
        """Nothing is watched any more."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=LAST_S)

    def _look(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
        every = min(1.0, self._max_stall_s / 10)
        with self._folder.stacks.open("a") as stacks:
            while not self._over.wait(every):
                quiet = time.monotonic() - self._last
                faulthandler.dump_traceback_later(self._max_stall_s + GIL_S, exit=True, file=stacks)
                if quiet > self._max_stall_s:
                    break
            else:
                faulthandler.cancel_dump_traceback_later()
                self._drop_if_empty()
                return
            self._complain(quiet, stacks)
            loop.call_soon_threadsafe(task.cancel)
            if self._over.wait(LAST_S):
                faulthandler.cancel_dump_traceback_later()
            else:
                os.write(2, f"podium: {self.complaint}\n".encode())
                self._folder.fail(f"NoProgressError: {self.complaint}")
                os._exit(NoProgressError.exit_code)

    def _complain(self, quiet: float, stacks: Any) -> None:
        global stalled
        stalled = True
        parts = {"the rollouts": sorted(self._unwritten), "the rewards": sorted(self._unscored)}
        waiting = "".join(f", waiting for {what} of prompts {_some(out)}" for what, out in parts.items() if out)
        self.complaint = (
            f"nothing moved for {quiet:.0f} s at stage {self._stage!r}{waiting}; the stacks of all threads are in "
            f"{self._folder.stacks}. Resume the run; if its steps take so long, raise run.max_stall_s"
        )
        pending = {"rollouts": parts["the rollouts"], "rewards": parts["the rewards"]}
        self._folder.event("stalled", stage=self._stage, **pending, seconds=quiet)
        faulthandler.dump_traceback(stacks, all_threads=True)
        stacks.flush()

    def _drop_if_empty(self) -> None:
        if self._folder.stacks.exists() and self._folder.stacks.stat().st_size == 0:
            self._folder.stacks.unlink()


def _some(ordinals: Sequence[int]) -> str:
    return ", ".join(map(str, ordinals[:SHOWN])) + (" and more" if len(ordinals) > SHOWN else "")


def watched(stages: Stages, watch: Watch) -> Stages:
    """The same stages, each telling the watch when the run comes to it."""
    return replace(
        stages,
        rollout=WatchedRollout(stages.rollout, watch),
        reward=cast(Any, WatchedReward(stages.reward, watch)),
        trainer=cast(Any, Told(stages.trainer, watch, {"step": "train"})),
        sync=cast(Any, Told(stages.sync, watch, {"push": "sync"})),
        evaluation=cast(Any, Told(stages.evaluation, watch, {"run_if_due": "evaluation"})),
        report=cast(Any, Told(stages.report, watch, {"start": "report", "write": "report"})),
        checkpoint=cast(
            Any, Told(stages.checkpoint, watch, dict.fromkeys(("commit_if_due", "commit", "finish"), "checkpoint"))
        ),
    )


class Told:
    """A stage whose calls by these names are told to the watch, when they begin and when they end."""

    def __init__(self, stage: Any, watch: Watch, names: dict[str, str]) -> None:
        self._stage, self._watch, self._names = stage, watch, names

    def __getattr__(self, name: str) -> Any:
        called = getattr(self._stage, name)
        return self._telling(called, self._names[name]) if name in self._names else called

    def _telling(self, called: Callable[..., Awaitable[T]], stage: str) -> Callable[..., Awaitable[T]]:
        async def call(*args: Any, **kwargs: Any) -> T:
            self._watch.at(stage)
            result = await called(*args, **kwargs)
            self._watch.at(f"after {stage}")
            return result

        return call


class WatchedRollout:
    def __init__(self, rollout: Any, watch: Watch) -> None:
        self._rollout, self._watch = rollout, watch

    async def start(self, prompts: Sequence[Prompt]) -> AsyncIterator[Group]:
        self._watch.sent([prompt.ordinal for prompt in prompts])
        async for group in self._rollout.start(prompts):
            self._watch.written(group.prompt.ordinal)
            yield group


class WatchedReward(Around):
    """A group is out until it is scored and passed on, after those before it."""

    def __init__(self, reward: Any, watch: Watch) -> None:
        super().__init__(reward)
        self._watch = watch

    async def score_each(self, groups: AsyncIterator[Group], after: Sequence[Group] = ()) -> AsyncIterator[Group]:
        async for group in self._stage.score_each(groups, after):
            self._watch.scored(group.prompt.ordinal)
            yield group
