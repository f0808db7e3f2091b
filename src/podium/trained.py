"""What a command is pointed at: a run, an adapter or a model, told as `[model]` and the weights that belong over it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.errors import InputError
from podium.run_folder import RunFolder
from podium.settings import read_toml

HOW_IT_COMPUTES = ("exact_sums",)
"""Keys of `[model]` that go with a trainer's settings and say nothing about the weights."""


@dataclass(frozen=True)
class Trained:
    model: dict[str, Any]
    """The `[model]` table, or what is known of it: its `name`."""
    weights: Path | None
    """A model folder or an adapter folder; None: the model as it is."""
    run: RunFolder | None
    """Where it was trained, if it is pointed at by its run."""


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
    """The `[model]` table that a run was trained with: which model it is, not how its trainer computed."""
    table = read_toml(run.settings).get("model", {})
    return {key: value for key, value in table.items() if key not in HOW_IT_COMPUTES}


def how_it_computes(model: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a `[model]` table that belongs to the trainer beside it."""
    return {key: value for key, value in model.items() if key in HOW_IT_COMPUTES}
