"""A broken run that goes on equals the unbroken one bit for bit; two runs of one seed are equal too."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from podium.cli import main
from tests import commands
from tests.conftest import small_tables

STEPS = 6
SCHEDULES = {  # besides those of chaos/test_kills.py
    "full weights": {"lora": False},
    "lora, windows of 2": {"sync_every": 2},
    "lora, never synced": {"sync_every": 0},
    "short epochs": {"max_rows": 7},
    "full weights, never synced": {"lora": False, "sync_every": 0},
    "refilled": {"filter": {"refill": True}},
    "refilled windows of 2": {"filter": {"refill": 2}, "sync_every": 2},
    "refilled over short epochs": {"filter": {"refill": True}, "max_rows": 7},
    "retiring": {"filter": {"retire_pass_rate": 0.5}, "max_rows": 9},
    "retiring, refilled windows of 2": {
        "filter": {"retire_pass_rate": 0.75, "refill": 2},
        "max_rows": 9,
        "sync_every": 2,
    },
}


def write_settings(folder: Path, schedule: dict[str, Any], *, steps: int = STEPS, seed: int = 0) -> Path:
    tables = small_tables(folder, steps=steps, seed=seed, sync_every=schedule.get("sync_every", 1))
    tables["reward"] = [{"name": "tests.killing:mortal"}]
    tables["eval"] = {"every": 3, "data": [{"name": "arithmetic", "split": "held_out", "max_rows": 8}]}
    if schedule.get("lora") is False:
        tables["model"]["lora"] = False
        tables["trainer"]["lr"] = 1e-4
    if "filter" in schedule:
        tables["filter"] = schedule["filter"]
    if "max_rows" in schedule:
        tables["data"][0]["max_rows"] = schedule["max_rows"]
    path = folder.with_suffix(".toml")
    path.write_text(tomli_w.dumps(tables))
    return path


def podium(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return commands.podium(*arguments, environment=os.environ | environment)


def all_that_counts(folder: Path) -> dict[str, Any]:
    """Every bit that must not depend on having been killed: weights, optimizer, random states, ledger, counters."""
    newest = max((folder / "checkpoints").iterdir())
    ledger = {path.name: path.read_bytes() for path in sorted((folder / "rollouts").iterdir())}
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timeless = [
        {key: value for key, value in line.items() if not key.startswith(("time/", "perf/")) and "per_s" not in key}
        for line in metrics
    ]
    return {
        "checkpoint": newest.name,
        "trainer": (newest / "trainer.safetensors").read_bytes(),
        "state": json.loads((newest / "state.json").read_text())["state"],
        "ledger": ledger,
        "metrics": timeless,
    }


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_killed_in_mid_step_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    schedule = SCHEDULES[name]
    assert main(["train", str(write_settings(tmp_path / "whole", schedule))]) == 0
    settings = write_settings(tmp_path / "broken", schedule)
    # 8 rewards for the first evaluation, 16 a step, 8 for that at step 3: call 86 is in the middle of the fifth step
    killed = podium("train", str(settings), KILL_AT_REWARD_CALL="86")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert sorted(path.name for path in (tmp_path / "broken" / "checkpoints").iterdir())[-1] < f"step-{STEPS:06d}"
    assert main(["resume", str(tmp_path / "broken")]) == 0
    assert all_that_counts(tmp_path / "broken") == all_that_counts(tmp_path / "whole")


def test_killed_again_and_again_and_still_the_same_bits(tmp_path: Path) -> None:
    assert main(["train", str(write_settings(tmp_path / "whole", {}))]) == 0
    settings = write_settings(tmp_path / "broken", {})
    assert podium("train", str(settings), KILL_AT_REWARD_CALL="13").returncode == -9  # before the first commit
    assert podium("resume", str(tmp_path / "broken"), KILL_AT_REWARD_CALL="40").returncode == -9
    assert podium("resume", str(tmp_path / "broken"), KILL_AT_REWARD_CALL="33").returncode == -9
    assert main(["resume", str(tmp_path / "broken")]) == 0
    assert all_that_counts(tmp_path / "broken") == all_that_counts(tmp_path / "whole")


def test_a_run_extended_after_its_end_equals_the_longer_one(tmp_path: Path) -> None:
    assert main(["train", str(write_settings(tmp_path / "whole", {}))]) == 0
    assert main(["train", str(write_settings(tmp_path / "short", {}, steps=3))]) == 0
    assert main(["resume", str(tmp_path / "short"), f"--run.steps={STEPS}"]) == 0
    assert all_that_counts(tmp_path / "short") == all_that_counts(tmp_path / "whole")


def test_two_runs_of_one_seed_are_equal_and_of_two_seeds_are_not(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        assert main(["train", str(write_settings(tmp_path / name, {}, steps=3, seed=seed))]) == 0
    one, two, three = (all_that_counts(tmp_path / name) for name in ("one", "two", "three"))
    assert one == two
    assert one["trainer"] != three["trainer"]


def test_every_sampled_rollout_stands_in_the_ledger_once(tmp_path: Path) -> None:
    settings = write_settings(tmp_path / "run", {})
    assert podium("train", str(settings), KILL_AT_REWARD_CALL="50").returncode == -9
    assert main(["resume", str(tmp_path / "run")]) == 0
    lines = [
        json.loads(line)
        for path in sorted((tmp_path / "run" / "rollouts").iterdir())
        for line in path.read_text().splitlines()
    ]
    keys = [(line["ordinal"], line["sample_index"]) for line in lines]
    assert keys == [(ordinal, k) for ordinal in range(4 * STEPS) for k in range(4)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_commits_and_the_run_goes_on_bit_for_bit(number: int, code: int, tmp_path: Path) -> None:
    settings = write_settings(tmp_path / "broken", {}, steps=200)
    process = commands.fork_server().start("train", str(settings), stdout=tmp_path / "out", stderr=tmp_path / "out")
    wait_for(lambda: (tmp_path / "broken" / "rollouts" / "step-000001.jsonl").exists())
    process.send_signal(number)
    assert process.wait(timeout=30) == code
    reached = json.loads((tmp_path / "broken" / "status.json").read_text())
    assert reached["state"] == "stopped"
    assert (tmp_path / "broken" / "checkpoints" / f"step-{reached['step']:06d}").is_dir()
    more = reached["step"] + 2
    assert main(["resume", str(tmp_path / "broken"), f"--run.steps={more}"]) == 0
    assert main(["train", str(write_settings(tmp_path / "whole", {}, steps=more))]) == 0
    assert all_that_counts(tmp_path / "broken") == all_that_counts(tmp_path / "whole")


def wait_for(condition, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.05)
