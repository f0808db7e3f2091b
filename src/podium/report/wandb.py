"""Weights & Biases, online or offline (`wandb sync RUN/wandb/offline-*` sends it later)."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from podium.report._tracker import Tracker
from podium.run_folder import RunFolder


class Wandb(Tracker):
    package = "wandb"

    def __init__(
        self,
        folder: RunFolder,
        *,
        project: Annotated[str, Field(description="where the run is put")] = "podium",
        entity: Annotated[str | None, Field(description="team or user; by default yours")] = None,
        mode: Annotated[
            Literal["online", "offline"], Field(description="offline keeps it in the run folder")
        ] = "online",
    ) -> None:
        super().__init__(folder)
        self._where = {"project": project, "entity": entity, "mode": mode}
        self._run: Any = None

    def open(self, card: Mapping[str, Any], last_step: int) -> None:
        import wandb

        self._run = wandb.init(
            **self._where,
            id=self.run_id,
            resume="allow",
            name=self.run_name,
            dir=str(self.folder.path),
            config=self.settings(),
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
        )
        # Steps by a column of their own: wandb's counter cannot go back, and a resume may.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def end(self, state: str) -> None:
        self._run.finish(exit_code=0 if state == "finished" else 1)
