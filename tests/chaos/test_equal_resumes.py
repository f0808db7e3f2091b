"""G4, R4: N steps at once equal k and then N − k, for every k, also at the ends of epochs and over two resumes."""

import itertools
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


def cases() -> list[tuple[str, tuple[int, ...]]]:
    """(variant, where it is broken off): once and twice."""
    made = []
    for name in VARIANTS:
        steps = range(2, STEPS, 2) if name == "windows of 2" else range(1, STEPS)
        made += [(name, breaks) for count in (1, 2) for breaks in itertools.combinations(steps, count)]
    return made


def test_there_are_a_hundred_cases() -> None:
    assert len(cases()) >= 100


@pytest.mark.parametrize(("variant", "breaks"), cases(), ids=str)
def test_g4_a_run_in_parts_equals_the_whole(
    variant: str, breaks: tuple[int, ...], server: ChaosJobs, whole: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole[variant], run)
    first, *others = breaks
    ends = [*others, STEPS]
    for number, end in enumerate(ends):
        step = ["--step", str(first)] if number == 0 else []
        assert server.run("resume", str(run), *step, f"--run.steps={end}") == 0, server.log
    assert all_that_counts(run) == all_that_counts(whole[variant])
    assert [event["step"] for event in events(run, "restored")] == list(breaks)


def test_r4_a_finished_run_has_nothing_to_do_and_says_so(
    server: ChaosJobs, whole: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(whole["epochs of 3"], tmp_path / "run")
    assert server.run("resume", str(tmp_path / "run")) == 0
    assert "is finished; nothing to do" in server.log
    assert events(tmp_path / "run", "restored") == []
