"""Weights & Biases, online or offline (`wandb sync RUN/wandb/offline-*` uploads an offline run later)."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from podium.report._tracker import Tracker
from podium.run.folder import RunFolder


class Wandb(Tracker):
    package = "wandb"

    def __init__(
        self,
        folder: RunFolder,
        *,
        project: Annotated[str, Field(description="project that the run belongs to")] = "podium",
        entity: Annotated[str | None, Field(description="team or user; default: your own")] = None,
        mode: Annotated[
            Literal["online", "offline"], Field(description="offline writes to the run folder only")
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
        # Steps are a column of their own: wandb's own counter cannot go back, which a resume may do.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def end(self, state: str) -> None:
        self._run.finish(exit_code=0 if state == "finished" else 1)
