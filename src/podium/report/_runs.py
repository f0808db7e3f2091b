"""Several runs side by side: which there are, their curves for an overlay, their settings for a comparison."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from podium.report._card import run_card
from podium.report._glossary import explanations
from podium.report._reader import RunReader
from podium.report._series import Series
from podium.report._timeline import LAPS

MAX_POINTS = 300
OVERLAID = (
    "reward/mean",
    "reward/correct_rate",
    "loss/total",
    "policy/entropy",
    "rollout/length_mean",
    "mismatch/abs_mean",
    "batch/kept_ratio",
)


def find_runs(folder: Path) -> dict[str, Path]:
    """Run folders below, one or two levels down, by the path from `folder`."""
    found = sorted([*folder.glob("*/settings.toml"), *folder.glob("*/*/settings.toml")])
    return {str(path.parent.relative_to(folder)): path.parent for path in found}


def runs_data(folder: Path, readers: Mapping[str, RunReader]) -> dict[str, Any]:
    """What the page of several runs draws, each reader refreshed."""
    return {
        "folder": str(folder),
        "runs": [_run_or_words(name, reader) for name, reader in readers.items()],
        "words": explanations((*OVERLAID, "eval/accuracy")),
    }


def _run_or_words(name: str, reader: RunReader) -> dict[str, Any]:
    """One run that cannot be shown does not take the others down with it."""
    try:
        return _run_data(name, reader)
    except Exception as error:
        status = {"state": "unreadable", "message": f"{type(error).__name__}: {error}"}
        empty = {"series": Series().sampled(MAX_POINTS), "evals": [], "settings": {}}
        return {"name": name, "link": f"run/{quote(name)}/", "card": run_card({}, reader.folder.path, 0)} | {
            "status": status,
            **empty,
        }


def _run_data(name: str, reader: RunReader) -> dict[str, Any]:
    status = reader.status()
    overlaid = Series()
    columns = {metric: reader.series.column(metric) for metric in OVERLAID}
    laps = [reader.series.column(f"time/{stage}_s") for stage in LAPS]
    for place, step in enumerate(reader.series.steps):
        line = {metric: value for metric, values in columns.items() if (value := values[place]) is not None}
        overlaid.add({"step": step, **line, "time/step_s": sum(values[place] or 0.0 for values in laps)})
    return {
        "name": name,
        "link": f"run/{quote(name)}/",
        "card": reader.card(status),
        "status": status,
        "series": overlaid.sampled(MAX_POINTS),
        "evals": reader.evals,
        "settings": flattened(reader.settings()),
    }


def flattened(tables: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys: {"run": {"seed": 0}} is {"run.seed": 0}; of several tables each has its number."""
    if isinstance(tables, list) and tables and all(isinstance(each, dict) for each in tables):
        tables = {str(number): each for number, each in enumerate(tables)}
    if not isinstance(tables, dict):
        return {prefix.removesuffix("."): tables}
    return {key: value for name, each in tables.items() for key, value in flattened(each, f"{prefix}{name}.").items()}
