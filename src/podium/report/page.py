"""report.html in the run folder: one self-contained file that shows the current state of the run.

It needs no network, account or server: open it from disk. It reloads itself while the run is running. It is made from
the run folder alone, so it has the full history after a kill and a resume. `podium report` serves the same page live.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from podium.records import EvalReport, StepReport
from podium.report.web.html import render
from podium.report.web.reader import RunReader
from podium.run.folder import RunFolder, write_atomically

EVERY_S = 2.0
"""Least time between two writes."""
MAX_SHARE = 0.005
"""Largest share of the run's time that goes into writing the page. A long run's page is written less often."""


class Page:
    def __init__(self, folder: RunFolder, every_s: float | None = None) -> None:
        self._folder, self._every_s = folder, EVERY_S if every_s is None else every_s
        self._reader: RunReader | None = None
        self._next = 0.0

    def start(self, card: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
        self._reader = RunReader(self._folder)
        self._write()

    def write(self, report: StepReport) -> None:
        if time.monotonic() >= self._next:
            self._write()

    def evaluated(self, report: EvalReport) -> None:
        """Nothing to do: the next write shows the evaluation."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._write()

    def fail(self) -> None:
        if self._reader is not None:
            self._write()

    def _write(self) -> None:
        assert self._reader is not None
        started = time.monotonic()
        self._reader.refresh()
        write_atomically(self._folder.page, render(self._reader.data()))
        ended = time.monotonic()
        self._next = ended + max(self._every_s, (ended - started) / MAX_SHARE if self._every_s else 0.0)
