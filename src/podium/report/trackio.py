"""Trackio: a local dashboard (`trackio show`), or a Hugging Face Space."""

import sys
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from podium.report._tracker import Tracker
from podium.run.folder import RunFolder
from podium.untrusted import warn


class Trackio(Tracker):
    package = "trackio"

    def __init__(
        self,
        folder: RunFolder,
        *,
        project: Annotated[str, Field(description="project that the run belongs to")] = "podium",
        space_id: Annotated[str | None, Field(description="Space to send the run to; default: none")] = None,
    ) -> None:
        super().__init__(folder)
        self._project, self._space_id = project, space_id
        self._run: Any = None
        for module in ("trackio", "trackio.run", "trackio.utils"):
            # Trackio prints progress to stdout, which `--json` needs for its own lines.
            vars(sys.modules[module])["print"] = _print_to_stderr

    def open(self, card: Mapping[str, Any], last_step: int) -> None:
        import trackio

        self._run = trackio.init(
            project=self._project,
            name=f"{self.run_name}-{self.run_id[:6]}",
            space_id=self._space_id,
            config=self.settings(),
            resume="allow",
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def end(self, state: str) -> None:
        import trackio

        trackio.finish()


def _print_to_stderr(*parts: object) -> None:
    warn(" ".join(map(str, parts)))
