"""A stored run: numbers that a change of code may not move unseen.

`PODIUM_WRITE_GOLDEN=1 pytest tests/test_golden.py` writes it anew; say in the commit why it moved.
"""

import json
import os
from pathlib import Path

import pytest

from podium.run.start import train
from podium.settings.tables import Settings
from tests.conftest import small_tables

GOLDEN = Path(__file__).parent / "golden" / "arithmetic_lora.json"
WATCHED = (
    "reward/mean",
    "loss/total",
    "optim/grad_norm",
    "policy/entropy",
    "rollout/length_mean",
    "batch/kept_ratio",
)
TOLERANCE = 1e-3
"""Relative. Float arithmetic differs between CPUs by far less; a changed sampler, loss or optimizer by far more."""


def run_metrics(folder: Path) -> list[dict[str, float]]:
    tables = small_tables(folder, steps=5, prompts_per_step=8) | {"data": [{"name": "arithmetic"}]}
    train(Settings.from_dict(tables))
    return [{name: line[name] for name in WATCHED} for line in lines_of(folder)]


def lines_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_run_is_the_stored_one(tmp_path: Path) -> None:
    found = run_metrics(tmp_path / "run")
    if os.environ.get("PODIUM_WRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    expected = json.loads(GOLDEN.read_text())
    assert len(found) == len(expected) == 5
    assert all(line["mismatch/abs_mean"] < 1e-4 for line in lines_of(tmp_path / "run"))  # sampled = recomputed, by LoRA
    for step, (mine, stored) in enumerate(zip(found, expected, strict=True), start=1):
        assert mine == pytest.approx(stored, rel=TOLERANCE, abs=1e-6), f"step {step}"
