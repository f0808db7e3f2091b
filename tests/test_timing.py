"""The estimate of a step's time: its arithmetic by hand, and against steps that were really run."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from podium.check import verdicts as check_module
from podium.check.calibrate import StepTiming
from podium.check.verdicts import check
from podium.cli import main
from podium.run.start import train
from podium.runtime.wiring.memory import memory_plan
from podium.settings.tables import Settings
from tests.conftest import small_tables

TIMING = StepTiming(rollouts=10, tokens=5, prompt_tokens=20.0, first_token_s=1.0, sample_s=3.0, train_s=2.5)


def test_sampling_grows_with_the_length_of_answers_and_the_number_of_rollouts() -> None:
    # four more tokens took 2 s, so half a second a token: the prompts and a first token, then nine more
    assert TIMING.sampling_s(rollouts=10, length=10) == pytest.approx(1.0 + 9 * 0.5)
    assert TIMING.sampling_s(rollouts=40, length=10) == pytest.approx(4 * 5.5)


def test_training_grows_with_tokens() -> None:
    # 10 × (20 + 5) tokens took 2.5 s, so 0.01 s a token
    assert TIMING.training_s(rollouts=10, length=30) == pytest.approx(10 * (20 + 30) * 0.01)


def test_answers_of_one_token_are_the_prompts_alone() -> None:
    one = replace(TIMING, tokens=1, sample_s=1.0)
    assert one.sampling_s(rollouts=10, length=1) == 1.0


def seconds_of(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"s": 1, "min": 60, "h": 3600, "days": 86400}[unit]


def test_the_estimate_is_of_the_size_of_real_steps(tmp_path: Path) -> None:
    """Within a factor of five, whatever else the machine does: it is for planning, not for benchmarks."""
    tables = small_tables(tmp_path / "run", steps=4, prompts_per_step=8, rollouts_per_prompt=8)
    tables["filter"] = {"accept": "all"}
    report, is_good = check(Settings.from_dict(tables))
    assert is_good
    found = re.search(r"a step takes about ([\d.]+ \w+) to ([\d.]+ \w+)", report)
    assert found is not None
    low, high = map(seconds_of, found.groups())
    train(Settings.from_dict(tables))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    real = sum(line["time/rollout_s"] + line["time/train_s"] for line in lines) / len(lines)
    assert low <= high
    assert low / 5 < real < high * 5


def test_what_does_not_fit_is_a_problem_and_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_module, "memory_plan", lambda *args: replace(memory_plan(*args), device=1000))
    path = tmp_path / "run.toml"
    path.write_text(Settings.from_dict(small_tables(tmp_path / "run")).to_toml())
    assert main(["check", str(path)]) == 2
    out = capsys.readouterr().out
    assert "memory: problem" in out
    assert "problem: too much: lower engine.concurrency" in out
    assert "not measured: it would not fit into memory" in out
    assert out.endswith("1 to fix before `podium train`\n")


def test_a_newcomer_is_told_what_would_spoil_a_run(tmp_path: Path) -> None:
    tables = small_tables(tmp_path / "run") | {"rollout": {"max_new_tokens": 3}}
    report, is_good = check(Settings.from_dict(tables))
    assert is_good
    assert "reward dry-run: note" in report
    assert "note: no group has signal" in report
    assert "note: every answer was cut at rollout.max_new_tokens; raise it" in report


def test_a_run_of_days_is_told(tmp_path: Path) -> None:
    report, _ = check(Settings.from_dict(small_tables(tmp_path / "run", steps=10_000_000)))
    assert "note: all steps take more than a day" in report
    assert re.search(r"10000000 steps take [\d.e+]+ days", report)
