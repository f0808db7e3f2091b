"""G4, R4: m steps at once equal k and then m − k, for every k < m, also at the ends of epochs and over many resumes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.harness import ChaosJobs, all_that_counts, events, tiny_tables, write_tables

STEPS = 7

VARIANTS: dict[str, dict[str, Any]] = {
    # an epoch of 3, 5 or 8 rows at 2 prompts a step: its ends fall between steps and inside of them
    "epochs of 3": {"data": [{"name": "arithmetic", "max_rows": 3}]},
    "epochs of 5": {"data": [{"name": "arithmetic", "max_rows": 5}]},
    "epochs of 8, full weights": {"data": [{"name": "arithmetic", "max_rows": 8}], "model": {"lora": False}},
    "refilled": {"filter": {"refill": 2}},
    "random loss": {"loss": {"name": "tests.chaos.parts:noisy_loss"}},
    "windows of 2": {"run": {"sync_every": 2}},
}


@pytest.fixture(scope="module")
def whole(shared_server: ChaosJobs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every variant in one go, with all its checkpoints kept."""
    scratch = tmp_path_factory.mktemp("whole")
    folders = {}
    for number, (name, changes) in enumerate(VARIANTS.items()):
        folder = scratch / f"run-{number}"
        tables = tiny_tables(folder, steps=STEPS) | {"checkpoint": {"every": 1, "keep": 99}}
        for section, given in changes.items():
            tables[section] = {**tables.get(section, {}), **given} if isinstance(given, dict) else given
        assert shared_server.run("train", write_tables(tables)) == 0, shared_server.log
        folders[name] = folder
    return folders


def commits(variant: str) -> list[int]:
    """Steps after which a run commits: all, or where a window ends."""
    return [2, 4, 6, 7] if variant == "windows of 2" else list(range(1, STEPS + 1))


CASES = [(variant, first) for variant in VARIANTS for first in commits(variant)[:-1]]


def committed(run: Path, step: int) -> tuple[bytes, Any]:
    """Weights, optimizer, random states; counters."""
    folder = run / "checkpoints" / f"step-{step:06d}"
    return (folder / "trainer.safetensors").read_bytes(), json.loads((folder / "state.json").read_text())["state"]


def test_there_are_a_hundred_cases() -> None:
    """Of a step from which a run goes on, and a later commit that is compared."""
    assert sum(step > first for variant, first in CASES for step in commits(variant)) >= 100


@pytest.mark.parametrize(("variant", "first"), CASES, ids=str)
def test_g4_a_run_in_parts_equals_the_whole(
    variant: str, first: int, server: ChaosJobs, whole: dict[str, Path], tmp_path: Path
) -> None:
    """Compared at each later commit, so that a run that ends there is compared too."""
    run = tmp_path / "run"
    shutil.copytree(whole[variant], run)
    past = len(events(run))
    assert server.run("resume", str(run), "--step", str(first), f"--run.steps={STEPS}") == 0, server.log
    later = [step for step in commits(variant) if step > first]
    assert [event["step"] for event in events(run)[past:] if event["event"] == "committed"] == later
    for step in later:
        assert committed(run, step) == committed(whole[variant], step), step
    assert all_that_counts(run) == all_that_counts(whole[variant])
    assert [event["step"] for event in events(run, "restored")] == [first]


@pytest.mark.parametrize("variant", VARIANTS)
def test_g4_a_run_that_ends_after_every_commit_equals_the_whole(
    variant: str, server: ChaosJobs, whole: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole[variant], run)
    first, *ends = commits(variant)
    for end in ends:
        step = ["--step", str(first)] if end == ends[0] else []
        assert server.run("resume", str(run), *step, f"--run.steps={end}") == 0, server.log
        assert committed(run, end) == committed(whole[variant], end), end
    assert all_that_counts(run) == all_that_counts(whole[variant])
    assert [event["step"] for event in events(run, "restored")] == [first, *ends[:-1]]


def test_r4_a_finished_run_has_nothing_to_do_and_says_so(
    server: ChaosJobs, whole: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(whole["epochs of 3"], tmp_path / "run")
    assert server.run("resume", str(tmp_path / "run")) == 0
    assert "is finished; nothing to do" in server.log
    assert events(tmp_path / "run", "restored") == []
