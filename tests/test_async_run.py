"""Runs of the async loop through the command line, with real parts: what overlapped, what was too old, what a kill
left."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from podium.cli import main
from tests.conftest import small_tables
from tests.test_resume import all_that_counts, podium


def write_settings(folder: Path, *, reward: str = "arithmetic", **run: Any) -> Path:
    tables = small_tables(folder, **{"steps": 6, "max_lag": 1} | run)
    tables["filter"] = {"accept": "all"}  # every step makes an update
    tables["reward"] = [{"name": reward}]
    path = folder.with_suffix(".toml")
    path.write_text(tomli_w.dumps(tables))
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ledger(folder: Path) -> list[dict[str, Any]]:
    return [line for path in sorted((folder / "rollouts").iterdir()) for line in lines_of(path)]


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    return [line for line in lines_of(folder / "events.jsonl") if line["event"] in kinds]


def test_a_steps_prompts_are_sampled_while_the_step_before_trains(tmp_path: Path) -> None:
    assert main(["train", str(write_settings(tmp_path / "run"))]) == 0
    order = events(tmp_path / "run", "sampling", "training", "trained", "pushed")
    kinds = [line["event"] for line in order]
    trained = [place for place, kind in enumerate(kinds) if kind == "trained"]
    sent = {ordinal: place for place, line in enumerate(order) for ordinal in line.get("ordinals", ())}
    for step in range(5):
        assert sent[4 * (step + 1)] < trained[step], "the next step's prompts wait for this one"
        assert step < 2 or sent[4 * step] > trained[step - 2], "sent before there was room"
    in_training = [kinds[place + 1 : kinds.index("trained", place)] for place, k in enumerate(kinds) if k == "training"]
    assert ["sampling"] in in_training
    assert all("pushed" not in between for between in in_training)
    metrics = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert [line["version/lag_max"] for line in metrics] == [0, 1, 1, 1, 1, 1]
    assert max(line["queue/prompts_in_flight"] + line["queue/groups_scored_waiting"] for line in metrics) > 0


@pytest.mark.parametrize("max_lag", [1, 2])
def test_two_runs_of_one_seed_are_equal(max_lag: int, tmp_path: Path) -> None:
    """With the in-process engine, inline rewards and no refills: then groups come by ordinal."""
    for name in ("one", "two"):
        assert main(["train", str(write_settings(tmp_path / name, max_lag=max_lag))]) == 0
    one, two = (all_that_counts(tmp_path / name) for name in ("one", "two"))
    for run in (one, two):  # how much was waiting at a moment is a matter of time
        run["metrics"] = [{k: v for k, v in line.items() if not k.startswith("queue/")} for line in run["metrics"]]
    assert one == two


def test_a_group_that_became_too_old_is_sampled_again_and_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAWDLE_OVER", "7")  # the last of its flight; those of the next overtake it
    monkeypatch.setenv("DAWDLE_UNTIL", str(tmp_path / "run" / "rollouts" / "step-000008.jsonl"))
    settings = write_settings(tmp_path / "run", reward="tests.dawdling:dawdling", steps=12, prompts_per_step=2)
    assert main(["train", str(settings)]) == 0
    [stale] = events(tmp_path / "run", "stale")
    assert stale["ordinal"] == 7
    assert stale["policy_version"] - stale["oldest"] > 1
    assert sum(7 in line["ordinals"] for line in events(tmp_path / "run", "sampling")) == 2
    late = [line for line in ledger(tmp_path / "run") if line["ordinal"] == 7]
    assert [line["sample_index"] for line in late] == [0, 1, 2, 3]
    assert all(line["policy_version"][0] > stale["oldest"] for line in late)
    metrics = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert sum(line["version/stale_resampled"] for line in metrics) == 1
    assert max(line["version/lag_max"] for line in metrics) <= 1


@pytest.mark.parametrize("in_flight", [False, True])
def test_rollouts_carry_two_versions_where_weights_change_in_flight(in_flight: bool, tmp_path: Path) -> None:
    settings = write_settings(tmp_path / "run", steps=12, max_lag=3, in_flight=in_flight)
    engine = '[engine]\nname = "tests.unhurried:Unhurried"\nconcurrency = 12\n'  # a flight is written bit by bit
    settings.write_text(settings.read_text() + engine)
    assert main(["train", str(settings)]) == 0
    spans = [last - first for first, last in (line["policy_version"] for line in ledger(tmp_path / "run"))]
    assert min(spans) == 0
    assert (max(spans) > 0) == in_flight
    assert max(line["version/lag_max"] for line in lines_of(tmp_path / "run" / "metrics.jsonl")) <= 3


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_killed_run_goes_on_without_losing_or_repeating_a_rollout(in_flight: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = write_settings(folder, reward="tests.killing:mortal", max_lag=2, in_flight=in_flight, steps=12)
    # 16 rewards a step and 48 ahead of it: five steps are trained, two commits due and the first of them written; then
    # again before the next commit is due
    for command, call in ((["train", str(settings)], "140"), (["resume", str(folder)], "20")):
        killed = podium(*command, KILL_AT_REWARD_CALL=call)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert events(folder, "committed")
    assert main(["resume", str(folder)]) == 0
    assert events(folder, "restored")
    keys = sorted((line["ordinal"], line["sample_index"]) for line in ledger(folder))
    assert keys == [(ordinal, k) for ordinal in range(12 * 4) for k in range(4)]
    versions = [line["version/policy"] for line in lines_of(folder / "metrics.jsonl")]
    assert versions == list(range(1, 13))
    newest = [
        max(line["policy_version"][1] for line in lines_of(path)) for path in sorted((folder / "rollouts").iterdir())
    ]
    assert all(version < step for step, version in enumerate(newest, start=1))
    assert max(line["version/lag_max"] for line in lines_of(folder / "metrics.jsonl")) <= 2


def test_what_is_pending_is_in_the_commit_and_drawn_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setenv("DAWDLE_OVER", "7")  # the last of the first flight
    monkeypatch.setenv("DAWDLE_UNTIL", str(folder / "checkpoints" / "step-000004"))
    settings = write_settings(folder, reward="tests.dawdling:dawdling", steps=8, max_lag=3, prompts_per_step=2)
    assert main(["train", str(settings)]) == 0
    saved = json.loads((folder / "checkpoints" / "step-000004" / "state.json").read_text())["state"]
    done = {line["ordinal"] for path in sorted((folder / "rollouts").iterdir())[:4] for line in lines_of(path)}
    assert 7 in saved["pending"]
    assert 8 in done
    assert sorted({*done, *saved["pending"]}) == list(range(saved["next_ordinal"]))
    assert main(["resume", str(folder), "--step=4", "--run.steps=9"]) == 0
    keys = sorted((line["ordinal"], line["sample_index"]) for line in ledger(folder))
    assert keys == [(ordinal, k) for ordinal in range(18) for k in range(4)]


def test_max_lag_0_is_the_strict_loop_bit_for_bit(tmp_path: Path) -> None:
    assert main(["train", str(write_settings(tmp_path / "one", max_lag=0))]) == 0
    plain = write_settings(tmp_path / "two", max_lag=0)
    plain.write_text(plain.read_text().replace("max_lag = 0\n", ""))
    assert main(["train", str(plain)]) == 0
    assert all_that_counts(tmp_path / "one") == all_that_counts(tmp_path / "two")
    metrics = lines_of(tmp_path / "one" / "metrics.jsonl")
    assert {line["version/lag_max"] for line in metrics} == {0}
    assert {line["time/overlap"] for line in metrics} == {0}
