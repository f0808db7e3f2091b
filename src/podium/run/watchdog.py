"""A watchdog that ends a run without progress.

Progress is a group that arrives or is scored, a step, a push or a commit; a living process is not progress. After
`stall_limit_s` without progress, the stacks of all threads go to stacks.txt, and the run ends with a `NoProgressError`
that names the stage and the pending prompts. If the run does not react (a thread that cannot be stopped), the process
exits. What was committed stays.
"""

import asyncio
import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from podium.errors import NoProgressError
from podium.observer import Observer
from podium.run.folder import RunFolder

LAST_S = 20.0
"""Seconds that a cancelled run has to end before the process exits."""
GIL_S = 30.0
"""Seconds after the stall limit at which faulthandler's C thread ends the process, if something holds the GIL."""
SHOWN = 20
"""Most prompts that the error lists."""
STALL_S = 1800.0
"""Longest time without progress, unless one answer may take longer."""
SLOWEST_TOKEN_S = 1.0
"""An answer may take this long per token: a large model on a busy machine does."""

stalled = False
"""Whether the watchdog ended a run of this process; a thread may then hang that Python would wait for at exit."""


def stall_limit_s(max_new_tokens: int) -> float:
    """Seconds without progress after which a run has stalled; longer where answers are long."""
    return max(STALL_S, SLOWEST_TOKEN_S * max_new_tokens)


class Watchdog:
    """Reads from the observer what the run is doing and when it last made progress."""

    def __init__(self, folder: RunFolder, observer: Observer, max_stall_s: float) -> None:
        self._folder, self._observer, self._max_stall_s = folder, observer, max_stall_s
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.complaint: str | None = None

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Surrounds the running loop in its task and turns a cancellation by the watchdog into a `NoProgressError`."""
        self._observer.at(self._observer.stage)
        self._over = threading.Event()
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
        """Stops watching."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=LAST_S)

    def _look(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
        every = min(1.0, self._max_stall_s / 10)
        with self._folder.stacks.open("a") as stacks:
            while not self._over.wait(every):
                quiet = time.monotonic() - self._observer.moved_at
                faulthandler.dump_traceback_later(self._max_stall_s + GIL_S, exit=True, file=stacks)
                if quiet > self._max_stall_s:
                    break
            else:
                faulthandler.cancel_dump_traceback_later()
                if self._folder.stacks.exists() and self._folder.stacks.stat().st_size == 0:
                    self._folder.stacks.unlink()
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
        stage, rollouts, rewards = self._observer.stage, self._observer.unwritten, self._observer.unscored
        waiting = "".join(
            f", waiting for the {what} of prompts {', '.join(map(str, sorted(ordinals)[:SHOWN]))}"
            f"{' and more' if len(ordinals) > SHOWN else ''}"
            for what, ordinals in (("rollouts", rollouts), ("rewards", rewards))
            if ordinals
        )
        self.complaint = (
            f"no progress for {quiet:.0f} s at stage {stage!r}{waiting}; the stacks of all threads are in "
            f"{self._folder.stacks}. Resume the run"
        )
        self._folder.event("stalled", stage=stage, rollouts=sorted(rollouts), rewards=sorted(rewards), seconds=quiet)
        faulthandler.dump_traceback(stacks, all_threads=True)
        stacks.flush()
