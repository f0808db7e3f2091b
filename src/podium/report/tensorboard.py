"""TensorBoard event files in the run folder, written by tensorboardX: `tensorboard --logdir RUN/tensorboard`."""

import time
from collections.abc import Mapping
from typing import Any

from podium.report._tracker import Tracker
from podium.run.folder import RunFolder


class Tensorboard(Tracker):
    package = "tensorboardX"

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(folder)
        self._writer: Any = None

    def open(self, card: Mapping[str, Any], last_step: int) -> None:
        import tensorboardX

        place = str(self.folder.path / "tensorboard")
        # Hides what was written after the commit from which a resume continues.
        purge_step = last_step + 1 if last_step else None
        # tensorboardX names files by the second; a resume within the same second would write over the first file.
        own = f".{time.time_ns()}"
        self._writer = tensorboardX.SummaryWriter(place, flush_secs=10, purge_step=purge_step, filename_suffix=own)
        if self.folder.settings.exists():
            text = self.folder.settings.read_text(encoding="utf-8")
            self._writer.add_text("settings", f"```toml\n{text}\n```", last_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def end(self, state: str) -> None:
        self._writer.close()
