"""What the experiment trackers share: each runs on its own thread, so that none can stop or slow the run.

The run puts a step's metrics into a bounded queue and continues. If a tracker is slower than the run, or hangs, the
oldest queued entries are dropped and counted. Only the first error of a tracker is reported. When the run ends, it
waits for a tracker only as long as the tracker makes progress.
"""

import hashlib
import importlib
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

from podium.records import EvalReport, StepReport
from podium.run.folder import RunFolder
from podium.untrusted import warn

MAX_WAITING = 1000
MAX_FAILURES = 5
"""Failures in a row after which a tracker gets no more calls."""
PATIENCE_S = 30.0
"""When the run ends, it does not wait for a call that takes longer than this."""

Call = Callable[[], object]


class Background:
    """Makes calls one after the other on a thread; `put` never waits. `warn` gets the first failure."""

    def __init__(self, warn: Callable[[str], None], max_waiting: int = MAX_WAITING) -> None:
        self._warn, self._max_waiting = warn, max_waiting
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        """None is the end."""
        self._busy_since: float | None = None
        self.num_dropped = 0
        self.num_failed = 0
        self._thread = threading.Thread(target=self._work, daemon=True, name="podium tracker")
        self._thread.start()

    def put(self, call: Call) -> None:
        if self._calls.qsize() >= self._max_waiting:
            with suppress(Empty):
                self._calls.get_nowait()
                self.num_dropped += 1
        self._calls.put(call)

    def close(self, patience_s: float = PATIENCE_S) -> bool:
        """Waits for the remaining calls; returns whether all were made.

        Gives up on a call that has been running for `patience_s`. A call that has already hung for longer costs no
        further waiting.
        """
        self._calls.put(None)
        while self._thread.is_alive():
            since = self._busy_since
            left = patience_s if since is None else since + patience_s - time.monotonic()
            if left <= 0:
                return False
            self._thread.join(min(left, 0.05))
        return True

    def _work(self) -> None:
        num_failed_in_a_row = 0
        while (call := self._calls.get()) is not None:
            if num_failed_in_a_row >= MAX_FAILURES:
                self.num_dropped += 1
                continue
            self._busy_since = time.monotonic()
            try:
                call()
                num_failed_in_a_row = 0
            except BaseException as error:
                num_failed_in_a_row += 1
                self.num_failed += 1
                if self.num_failed == 1:
                    self._warn(f"{type(error).__name__}: {error}")
            self._busy_since = None


class Tracker:
    """A report that sends everything to a package in the background.

    Subclasses implement `open`, `log` and `end`, which run on the tracker's own thread.
    """

    package: ClassVar[str]
    """The package that must be installed."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        importlib.import_module(self.package)  # now, because an import during the run would slow it
        self._background: Background | None = None

    def open(self, card: Mapping[str, Any], last_step: int) -> None:
        """`last_step` is the last step that a resume keeps; the steps after it will be logged again."""
        raise NotImplementedError

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise NotImplementedError

    def end(self, state: str) -> None:
        raise NotImplementedError

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

    @property
    def run_id(self) -> str:
        """Unique to this run, and the same after every resume."""
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
            self._warn("it did not respond and was abandoned; the run's own record is complete")
        elif dropped:
            self._warn(f"{dropped} steps were dropped because it was slower than the run")
        self._background = None

    def _warn(self, message: str) -> None:
        name = type(self).__name__.lower()
        self.folder.event("tracker_trouble", tracker=name, message=message)
        warn(f"report {name!r}: {message}")
