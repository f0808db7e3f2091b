"""A run whose folder is deleted, moved or emptied under it stops and says so; it does not go on in a new one."""

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from podium import declare_range
from podium.cli import main
from podium.errors import StorageError
from podium.records import Prompt, Rollout
from podium.run.folder import RunFolder
from podium.settings.tables import Settings
from tests.conftest import small_tables


def empty(run: Path) -> None:
    for path in run.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


LOSSES: dict[str, Callable[[Path], object]] = {
    "deleted": shutil.rmtree,
    "moved": lambda run: run.rename(run.with_name("elsewhere")),
    "emptied": empty,
    "replaced": lambda run: (shutil.rmtree(run), run.mkdir()),
}


def is_committing(run: Path) -> bool:
    events = (run / "events.jsonl").read_text()
    return events.count('"committing"') > events.count('"committed"')


@declare_range(0.0, 1.0)
def losing(prompt: Prompt, rollout: Rollout) -> float:
    """Once the run has written as many steps as PODIUM_LOSE_AT says, its folder goes."""
    run = Path(os.environ["PODIUM_LOSE"])
    metrics = run / "metrics.jsonl"
    if metrics.exists() and metrics.read_bytes().count(b"\n") >= int(os.environ["PODIUM_LOSE_AT"]):
        with suppress(OSError):  # another worker may be quicker
            while is_committing(run):  # a commit that is being written ends with its own error, or is left half deleted
                time.sleep(0.01)
            LOSSES[os.environ["PODIUM_LOSE_HOW"]](run)
    return float(len(rollout.text) % 2)


@pytest.mark.parametrize("steps_before", [1, 2])
@pytest.mark.parametrize("how", LOSSES)
def test_a_run_that_loses_its_folder_says_so_and_makes_no_other(
    how: str, steps_before: int, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    tables = small_tables(run, steps=20) | {"reward": [{"name": "tests.test_lost_folder:losing"}]}
    (tmp_path / "settings.toml").write_text(Settings.from_dict(tables).to_toml())
    monkeypatch.setenv("PODIUM_LOSE", str(run))
    monkeypatch.setenv("PODIUM_LOSE_AT", str(steps_before))
    monkeypatch.setenv("PODIUM_LOSE_HOW", how)
    assert main(["train", str(tmp_path / "settings.toml")]) == StorageError.exit_code
    told = capfd.readouterr().err
    assert "was deleted, moved or emptied while the run wrote to it" in told
    assert "Traceback" not in told
    assert not (run / "checkpoints").exists()
    assert not (run / "final").exists()


def test_a_lock_file_that_is_deleted_alone_is_no_loss(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.settings.write_text("")
    (folder.path / "lock").unlink()
    folder.event("still here")
    assert folder.has_event("still here")
    folder.unlock()
