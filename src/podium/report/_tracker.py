"""What the experiment trackers share: a thread of its own for each, so that none can stop or slow the run.

The run hands over a step's numbers and goes on. They wait in a queue of bounded length; where a tracker is slower than
the run, or hangs, the oldest waiting ones are dropped and counted. A tracker that raises is told once and passed over.
When the run ends, the tracker is waited for only as long as it gets something done.
"""

import hashlib
import importlib
import threading
import time
import tomllib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from podium.records import EvalReport, StepReport
from podium.run_folder import RunFolder
from podium.terminal import warn

MAX_WAITING = 1000
MAX_FAILURES = 5
"""Failures in a row after which a tracker is left alone."""
PATIENCE_S = 30.0
"""A call that takes longer is not waited for when the run ends."""

Call = Callable[[], object]


class Background:
    """Calls, one after the other, on a thread; `put` never waits. `warn` is told of the first failure."""

    def __init__(self, warn: Callable[[str], None], max_waiting: int = MAX_WAITING) -> None:
        self._warn, self._max_waiting = warn, max_waiting
        self._calls: deque[Call] = deque()
        self._changed = threading.Condition()
        self._busy_since: float | None = None
        self._is_closing = False
        self._num_failed_in_a_row = 0
        self.num_dropped = 0
        self.num_failed = 0
        self._thread = threading.Thread(target=self._work, daemon=True, name="podium tracker")
        self._thread.start()

    def put(self, call: Call) -> None:
        with self._changed:
            if len(self._calls) >= self._max_waiting:
                self._calls.popleft()
                self.num_dropped += 1
            self._calls.append(call)
            self._changed.notify()

    def close(self, patience_s: float = PATIENCE_S) -> bool:
        """Whether all calls were made. Gives up on a call that has been under way for `patience_s`, however long ago
        it began: one that hung through the whole run costs nothing now."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        while self._thread.is_alive():
            since = self._busy_since
            left = patience_s if since is None else since + patience_s - time.monotonic()
            if left <= 0:
                return False
            self._thread.join(min(left, 0.05))
        return True

    def _work(self) -> None:
        while (call := self._next()) is not None:
            self._busy_since = time.monotonic()
            try:
                call()
                self._num_failed_in_a_row = 0
            except BaseException as error:
                self._failed(error)
            self._busy_since = None

    def _next(self) -> Call | None:
        with self._changed:
            while not self._calls and not self._is_closing:
                self._changed.wait()
            return self._calls.popleft() if self._calls else None

    def _failed(self, error: BaseException) -> None:
        self.num_failed += 1
        self._num_failed_in_a_row += 1
        if self.num_failed == 1:
            self._warn(f"{type(error).__name__}: {error}")
        if self._num_failed_in_a_row >= MAX_FAILURES:
            with self._changed:
                self._max_waiting = 0
                self.num_dropped += len(self._calls)
                self._calls.clear()


class Tracker:
    """A report that hands everything to a package of its own, in the background. A file of this folder says how."""

    package: ClassVar[str]
    """What must be installed."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        importlib.import_module(self.package)  # now: an import while the run goes on would slow it
        self._background: Background | None = None

    # What a tracker must do, all on its own thread.

    def open(self, card: Mapping[str, Any], last_step: int) -> None:
        """`last_step`: after a resume, the last one that stands; what was logged after it will come again."""
        raise NotImplementedError

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise NotImplementedError

    def end(self, state: str) -> None:
        raise NotImplementedError

    # What the run calls.

    def start(self, card: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
        last_step = max((line["step"] for line in history), default=0)
        self._background = Background(self._warn)
        self._background.put(lambda: self.open(card, last_step))

    def write(self, report: StepReport) -> None:
        self._put(lambda: self.log(report.state.step, report.metrics))

    def evaluated(self, report: EvalReport) -> None:
        self._put(lambda: self.log(report.step, report.metrics))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._close(summary["state"])

    def fail(self) -> None:
        self._close("failed")

    # For the trackers' files.

    @property
    def run_id(self) -> str:
        """The same over every resume of this run, and no other's."""
        first = self.folder.events.read_text().partition("\n")[0] if self.folder.events.exists() else ""
        return hashlib.blake2b(f"{self.folder.path.resolve()}\n{first}".encode(), digest_size=8).hexdigest()

    @property
    def run_name(self) -> str:
        return self.folder.path.resolve().name

    def settings(self) -> dict[str, Any]:
        return tomllib.loads(self.folder.settings.read_text(encoding="utf-8")) if self.folder.settings.exists() else {}

    def _put(self, call: Call) -> None:
        if self._background is not None:
            self._background.put(call)

    def _close(self, state: str) -> None:
        if self._background is None:
            return
        self._background.put(lambda: self.end(state))
        is_done = self._background.close()
        dropped = self._background.num_dropped
        if not is_done:
            self._warn("it did not answer and is left behind; the run's own record is whole")
        elif dropped:
            self._warn(f"{dropped} steps were dropped: it was slower than the run")
        self._background = None

    def _warn(self, message: str) -> None:
        name = type(self).__name__.lower()
        self.folder.event("tracker_trouble", tracker=name, message=message)
        warn(f"report {name!r}: {message}")
