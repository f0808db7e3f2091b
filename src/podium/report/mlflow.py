"""MLflow: a tracking server, or a database in the run folder (`mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db`)."""

import os
import time
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from podium.report._tracker import Tracker
from podium.run.folder import RunFolder, flattened

MAX_VALUE = 500
"""MLflow's limit for the characters of a parameter."""


class Mlflow(Tracker):
    package = "mlflow"

    def __init__(
        self,
        folder: RunFolder,
        *,
        tracking_uri: Annotated[
            str | None, Field(description="default: MLFLOW_TRACKING_URI, else a database in the run folder")
        ] = None,
        experiment: Annotated[str, Field(description="experiment that the run belongs to")] = "podium",
    ) -> None:
        super().__init__(folder)
        in_folder = f"sqlite:///{folder.path.resolve() / 'mlflow.db'}"
        self._uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or in_folder
        self._experiment, self._client, self._run = experiment, None, ""

    def open(self, card: Mapping[str, Any], last_step: int) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client: Any = MlflowClient(self._uri)
        known = client.get_experiment_by_name(self._experiment)
        experiment = known.experiment_id if known else client.create_experiment(self._experiment)
        same = f"tags.podium_run = '{self.run_id}'"
        before = client.search_runs([experiment], filter_string=same, max_results=1)
        if before:
            self._run = before[0].info.run_id
            client.update_run(self._run, status="RUNNING")
        else:
            self._run = client.create_run(
                experiment, run_name=self.run_name, tags={"podium_run": self.run_id}
            ).info.run_id
            params = [Param(key, str(value)[:MAX_VALUE]) for key, value in flattened(self.settings()).items()]
            for first in range(0, len(params), 100):
                client.log_batch(self._run, params=params[first : first + 100])
        self._client = client

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        assert self._client is not None
        now = int(time.time() * 1000)
        self._client.log_batch(self._run, metrics=[Metric(name, value, now, step) for name, value in metrics.items()])

    def end(self, state: str) -> None:
        status = {"finished": "FINISHED", "stopped": "KILLED"}.get(state, "FAILED")
        if self._client is not None:
            self._client.set_terminated(self._run, status)
