"""report.html in the run folder: one self-contained file that always shows the run as it stands.

No network, no account, no server: open it from disk; while the run goes on it reloads itself. It is made from the run
folder alone, so after a kill and a resume the history is whole. `podium report` serves the same page live.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from podium.records import EvalReport, StepReport
from podium.report._reader import RunReader
from podium.report._render import render
from podium.run_folder import RunFolder, write_atomically

MAX_SHARE = 0.005
"""Of the run's time, at most so much is spent on the page; a long run's page takes longer and is written less often."""


class Page:
    def __init__(
        self,
        folder: RunFolder,
        *,
        every_s: Annotated[float, Field(ge=0, description="seconds between two writes at least")] = 2.0,
    ) -> None:
        self._folder, self._every_s = folder, every_s
        self._reader: RunReader | None = None
        self._next = 0.0

    def start(self, card: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
        self._reader = RunReader(self._folder)
        self._write()

    def write(self, report: StepReport) -> None:
        if time.monotonic() >= self._next:
            self._write()

    def evaluated(self, report: EvalReport) -> None:
        """The next write shows it."""

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
