"""A reference in a process of its own: the same numbers, a typed error when it dies, and nothing left behind."""

import asyncio
import json
import os
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from podium.errors import InputError, ReferenceLostError
from podium.loss.grpo import grpo
from podium.loss.objective import Objective
from podium.records import ReferenceSettings
from podium.runtime.wiring.trainer import ReferenceProcess
from podium.settings.tables import Settings
from podium.trainer.build import check_reference
from tests import forked_keepers
from tests.commands import fork_server, podium
from tests.trainer.test_single import a_trainer, batches

SETTINGS = """
[run]
steps = 3
prompts_per_step = 4
rollouts_per_prompt = 4
[model]
device = "cpu"
lora = false
[rollout]
max_new_tokens = 24
[trainer]
lr = 1e-4
[loss]
kl_beta = 0.1
[checkpoint]
every = 1
[[data]]
name = "arithmetic"
max_rows = 1000
[[reward]]
name = "arithmetic"
"""
APART = "--model.reference={device='cpu'}"
EMBEDDED = {"name": "embedded", "device": "cpu", "lora": False}


def command(folder: Path, *flags: str) -> list[str]:
    settings = folder.with_suffix(".toml")
    settings.write_text(SETTINGS)
    return ["train", str(settings), f"--run.folder={folder}", "--quiet", *flags]


def forked(mark: str) -> dict[str, Any]:
    """Of a job whose reference's fork server is forked from it: tests/forked_keepers.py. Where the reference of this
    process has a test, a fresh interpreter starts it, as for a user."""
    return {
        "environment": os.environ | {forked_keepers.MARK: mark},
        "prepare": ["tests.forked_keepers:instead_of_interpreters"],
    }


def processes(mark: str) -> list[int]:
    """The fork server of a reference and its child, if they are of the job with that mark."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and forked_keepers.holds_mark(str(entry), mark):
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    return sorted(found, key=lambda pid: found[pid] in found)  # the child comes last


def test_its_logprobs_are_those_of_a_reference_beside_the_policy() -> None:
    trainer = a_trainer(lora=False, loss=Objective(grpo, kl_beta=0.1), reference=ReferenceSettings())
    [batch] = batches(trainer, [[0, 1, 2, 3]])
    asyncio.run(trainer.step([batch]))
    assert trainer._reference is not None
    expected = trainer._reference.logprobs(trainer._place(batch))
    policy = trainer._snapshot(trainer._place(batch))
    with closing(ReferenceProcess(EMBEDDED, "float32", 0)) as reference:
        found = reference.logprobs(batch)
    assert torch.equal(found, expected)
    assert not torch.equal(found, policy)


def test_a_run_with_it_is_the_run_without_it_and_leaves_no_process(tmp_path: Path) -> None:
    finals = []
    for name, flag in (("beside", "--model.reference=initial"), ("apart", APART)):
        mark = f"{name}-{os.getpid()}"
        done = podium(*command(tmp_path / name, flag), **forked(mark))
        assert done.returncode == 0, done.stderr
        assert processes(mark) == []
        finals.append(load_file(tmp_path / name / "final" / "model.safetensors"))
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])
    lines = [json.loads(line) for line in (tmp_path / "apart" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss/kl"] == 0.0  # the policy is its reference still
    assert lines[-1]["loss/kl"] > 0.0


@pytest.mark.parametrize("victim", ["reference", "driver"])
def test_a_death_is_told_and_leaves_nothing(tmp_path: Path, victim: str) -> None:
    folder, told = tmp_path / "run", tmp_path / "stderr"
    mark = f"{victim}-{os.getpid()}"
    process = fork_server().start(
        *command(folder, APART, "--run.steps=5000"),
        stdout=tmp_path / "stdout",
        stderr=told,
        **forked(mark),
    )
    try:
        _until(lambda: len(processes(mark)) == 2 and any((folder / "checkpoints").glob("step-*")), 120)
        if victim == "driver":
            process.kill()
            process.wait(60)
            _until(lambda: processes(mark) == [], 30)
            return
        os.kill(processes(mark)[-1], signal.SIGKILL)
        process.wait(60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "the reference is lost: its process was killed by SIGKILL" in told.read_text()
    assert json.loads((folder / "status.json").read_text())["state"] == "failed"


def _until(is_so, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_model_that_cannot_be_loaded_is_told() -> None:
    with pytest.raises(ReferenceLostError, match="the process of the reference failed: InputError"):
        ReferenceProcess(EMBEDDED | {"name": "/nowhere"}, "float32", 0)


def test_what_has_no_effect_or_no_device_is_refused() -> None:
    tables = {"reward": [{"name": "arithmetic"}], "loss": {"kl_beta": 0.1}}
    with pytest.raises(InputError, match=r"model\.reference\.device has no effect under LoRA"):
        Settings.from_dict({**tables, "model": {"reference": {"device": "cpu"}}})
    given = Settings.from_dict({**tables, "model": {"lora": False, "reference": {"device": "cuda:4711"}}})
    with pytest.raises(InputError, match=r"'cuda:4711': there is no such device; there are: cpu"):
        check_reference(given)
    with pytest.raises(InputError, match=r"model\.reference"):
        Settings.from_dict({**tables, "model": {"lora": False, "reference": {"device": "tpu"}}})
