"""From a command's target (a run, an adapter or a model) to its `[model]` table and the trained weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.errors import InputError
from podium.run.folder import RunFolder
from podium.settings.tables import read_run_settings


@dataclass(frozen=True)
class Trained:
    model: dict[str, Any]
    """The `[model]` table, or only its `name` if no more is known."""
    weights: Path | None
    """A model folder or an adapter folder; None: the model itself."""
    run: RunFolder | None
    """The run that trained it, if the target is a run."""


def find_trained(target: str) -> Trained:
    """`target` is a run folder, an adapter folder, a model folder or a model's name."""
    path = Path(target).expanduser()
    if (path / "settings.toml").is_file():
        run = RunFolder.open(path)
        if not run.final.is_dir():
            raise InputError(f"{path} has no trained model yet: {run.final} is written when the run finishes")
        return Trained(run_model(run), run.final, run)
    adapter = path / "adapter_config.json"
    if not adapter.is_file():
        return Trained({"name": target}, None, None)
    try:
        base = json.loads(adapter.read_text())["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str):
        raise InputError(f"{adapter} does not name its base model (base_model_name_or_path)")
    return Trained({"name": base}, path, None)


def run_model(run: RunFolder) -> dict[str, Any]:
    """The `[model]` table that a run was trained with."""
    return read_run_settings(run.settings).get("model", {})
