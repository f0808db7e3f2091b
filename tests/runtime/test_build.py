"""Settings that must reach the stages of a real run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from podium.check import check
from podium.errors import InputError
from podium.records import Prompt, Rollout
from podium.run import train
from podium.settings import Settings
from tests.conftest import small_tables


def rollouts_of(folder: Path) -> list[dict[str, Any]]:
    paths = sorted((folder / "rollouts").iterdir())
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_the_penalty_of_the_settings_reaches_the_rewards(tmp_path: Path) -> None:
    tables = small_tables(tmp_path / "run", steps=1)
    tables["rollout"]["max_new_tokens"] = 16  # some answers of this model are longer, some are not
    tables["scoring"] = {"non_stop_penalty": -3.0}
    train(Settings.from_dict(tables))
    by_end = {"stop": set(), "length": set()}
    for line in rollouts_of(tmp_path / "run"):
        by_end[line["finish_reason"]].add(line["reward"])
    assert by_end["length"] == {-3.0}
    assert by_end["stop"]
    assert -3.0 not in by_end["stop"]


def boundless(prompt: Prompt, rollout: Rollout) -> float:
    """A reward that declares no range."""
    return float(len(rollout.text))


BOUNDLESS = "tests.runtime.test_build:boundless"


def rows_scored_by(path: Path, *rewards: str) -> list[dict[str, Any]]:
    rows = [{"prompt": f"What is 1{n} + 20?", "answer": f"3{n}", "reward": name} for n, name in enumerate(rewards)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [{"name": "jsonl", "path": str(path)}]


def retiring(folder: Path, *rewards: str) -> dict[str, Any]:
    """Settings that retire rows, each row scored by the reward of its place."""
    tables = small_tables(folder / "run", steps=1)
    tables |= {"filter": {"retire_pass_rate": 0.9}, "reward": [], "data": rows_scored_by(folder / "a.jsonl", *rewards)}
    return tables


@pytest.mark.parametrize("command", [train, check])
def test_rows_cannot_be_retired_where_no_rollout_is_known_to_be_correct(tmp_path: Path, command: Callable) -> None:
    settings = Settings.from_dict(retiring(tmp_path, "exact", BOUNDLESS))
    with pytest.raises(InputError) as caught:
        command(settings)
    assert str(caught.value) == (
        f"filter.retire_pass_rate = 0.9: reward {BOUNDLESS!r} does not declare its highest value, so no rollout is "
        "known to be correct; put podium.declare_range(lowest, highest) on it, or remove the setting"
    )
    assert not (tmp_path / "run").exists()


def test_only_the_rewards_of_the_training_rows_must_be_known(tmp_path: Path) -> None:
    tables = retiring(tmp_path, "exact", "arithmetic")
    tables["eval"] = {"data": rows_scored_by(tmp_path / "held_out.jsonl", BOUNDLESS)}
    assert train(Settings.from_dict(tables)).step == 1


def test_a_reward_without_a_highest_value_is_fine_where_nothing_is_retired(tmp_path: Path) -> None:
    tables = retiring(tmp_path, BOUNDLESS)
    del tables["filter"]
    assert train(Settings.from_dict(tables)).step == 1


def test_a_program_cannot_be_promised_more_memory_than_its_process_has(tmp_path: Path) -> None:
    tables = small_tables(tmp_path / "run")
    row = {"prompt": "Write add.", "answer": ["assert add(1, 2) == 3"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    tables["data"] = [{"name": "jsonl", "path": str(tmp_path / "rows.jsonl")}]
    tables["reward"] = [{"name": "code", "memory_mb": 8192, "sandbox": "weak"}]
    with pytest.raises(InputError, match=r"memory_mb = 8192 has no effect, its process may take 4096"):
        check(Settings.from_dict(tables))
    assert "reward dry-run" in check(Settings.from_dict(tables | {"scoring": {"worker_memory_mb": 8192}}))[0]
