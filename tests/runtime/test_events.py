"""The order of things in a run, read from its event log."""

import json
from pathlib import Path

import pytest

from podium import cli

SETTINGS = """
[run]
steps = 4
prompts_per_step = 2
rollouts_per_prompt = 4
[model]
device = "cpu"
[rollout]
max_new_tokens = 24
[trainer]
lr = 5e-4
[filter]
accept = "all"
[[data]]
name = "arithmetic"
max_rows = 1000
[[reward]]
name = "arithmetic"
"""


def order(tmp_path: Path, sync_every: int) -> str:
    """s: prompts sent, g: a group arrived, T: training began, t: it ended, p: weights pushed."""
    (tmp_path / "s.toml").write_text(SETTINGS)
    folder = tmp_path / "run"
    flags = [f"--run.folder={folder}", f"--run.sync_every={sync_every}", "--quiet"]
    assert cli.main(["train", str(tmp_path / "s.toml"), *flags]) == 0
    letters = {"sampling": "s", "group": "g", "training": "T", "trained": "t", "pushed": "p"}
    lines = [json.loads(line)["event"] for line in (folder / "events.jsonl").read_text().splitlines()]
    return "".join(letters.get(line, "") for line in lines)


def test_with_sync_every_1_each_step_is_sampled_trained_and_synced_in_turn(tmp_path: Path) -> None:
    assert order(tmp_path, 1) == "p" + "sggTtp" * 4


def test_with_sync_every_2_a_windows_prompts_start_at_once_and_one_sync_follows(tmp_path: Path) -> None:
    """Groups of the second step may still be written while the first trains."""
    found = order(tmp_path, 2)
    assert found.replace("g", "") == "p" + "sTtTtp" * 2
    assert found.count("g") == 8


def test_with_sync_every_0_no_weights_follow_the_first(tmp_path: Path) -> None:
    found = order(tmp_path, 0)
    assert found.count("p") == 1
    assert found.startswith("p")
    assert found.count("t") == 4


@pytest.mark.parametrize("sync_every", [1, 2])
def test_rollouts_carry_the_version_that_wrote_them(tmp_path: Path, sync_every: int) -> None:
    order(tmp_path, sync_every)
    lines = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    versions = [line["policy_version"] for line in lines if line["event"] == "group"]
    assert versions == [[step // sync_every * sync_every] * 2 for step in range(4) for _ in range(2)]
