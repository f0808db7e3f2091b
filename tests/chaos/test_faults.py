"""G6 and scenarios of section 2: a fault that can be survived is, one that cannot ends the run soon and by its name."""

import json
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.chaos.harness import (
    ChaosJobs,
    all_that_counts,
    events,
    leftovers,
    stalls_after,
    tiny_tables,
    wait_until,
    write_tables,
)
from tests.commands import ROOT, podium

MAX_S = 60.0
"""From the fault to the end of the process; the machine may be busy."""


def parts(name: str) -> str:
    return f"tests.chaos.parts:{name}"


FATAL: dict[str, tuple[dict[str, Any], str, str, str]] = {
    # scenario → settings, what the fault says when it fires, the typed error, a part of its message
    "R8 an engine that is dead for good": (
        {"engine": {"name": parts("DeadEngine")}}, "fault: breaks off", "EngineError", "the connection is gone",
    ),
    "G6 an engine that never answers": (
        {"engine": {"name": parts("HangingEngine")}},
        "fault: hangs", "NoProgressError", "'rollout and reward', waiting for the rollouts of prompts 5",
    ),
    "R9 an engine whose thread is stuck": (
        {"engine": {"name": parts("StuckEngine")}},
        "fault: is stuck", "NoProgressError", "no progress for",
    ),
    "N1 a loss that is never finite": (
        {"loss": {"name": parts("poisoned_loss")}, "run": {"steps": 60}},
        "fault: poisons the loss", "StalledError", "changed the policy",
    ),
    "N1 weights that are no numbers": (
        {"trainer": {"name": parts("PoisoningTrainer")}, "run": {"steps": 40}},
        "fault: poisons a weight", "WeightsError", "not finite numbers before the push",
    ),
}  # fmt: skip


def merged(folder: Path, changes: dict[str, Any]) -> str:
    tables = tiny_tables(folder)
    for section, given in changes.items():
        tables[section] = {**tables.get(section, {}), **given}
    return write_tables(tables)


@pytest.mark.parametrize("scenario", FATAL)
def test_g6_a_fatal_fault_ends_the_run_by_its_name(scenario: str, server: ChaosJobs, tmp_path: Path) -> None:
    changes, fired, error, message = FATAL[scenario]
    started = time.monotonic()
    limits = stalls_after(2) if error == "NoProgressError" else {}
    status = server.run("train", merged(tmp_path / "run", changes), constants=limits)
    assert time.monotonic() - started < MAX_S
    assert status == 1, server.log
    assert fired in server.log
    assert "Traceback" not in server.log.rpartition(fired)[2]
    status_file = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status_file["state"], status_file["message"].split(":")[0]) == ("failed", error)
    assert message in status_file["message"]
    if "poisons a weight" not in fired and "loss" not in fired:
        assert [event["step"] for event in events(tmp_path / "run", "committed")][-1] == 2
    assert leftovers(tmp_path / "run") == []


def test_n1_weights_that_are_no_numbers_are_neither_pushed_nor_saved(server: ChaosJobs, tmp_path: Path) -> None:
    """The first update is committed; the second, which is poisoned, never is."""
    changes = {"trainer": {"name": parts("PoisoningTrainer")}, "run": {"steps": 40}}
    assert server.run("train", merged(tmp_path / "run", changes)) == 1
    versions = [event["policy_version"] for event in events(tmp_path / "run", "pushed")]
    assert max(versions) == 1
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    assert json.loads((newest / "state.json").read_text())["state"]["policy_version"] == 1


def test_g6_a_stall_leaves_the_stacks_of_all_threads_and_the_prompts_it_waits_for(
    server: ChaosJobs, tmp_path: Path
) -> None:
    changes = {"engine": {"name": parts("HangingEngine")}}
    assert server.run("train", merged(tmp_path / "run", changes), constants=stalls_after(2)) == 1
    [stall] = events(tmp_path / "run", "stalled")
    assert (stall["rollouts"], stall["rewards"]) == ([5], [4])
    stacks = (tmp_path / "run" / "stacks.txt").read_text()
    assert stacks.count("hread 0x") >= 3  # the loop's, the device's, the watchdog's own


@pytest.mark.timeout(240)
def test_r9_a_call_that_holds_the_interpreter_is_ended_from_c(server: ChaosJobs, tmp_path: Path) -> None:
    """No thread of Python can run; faulthandler's can. The status then says running, and a resume works."""
    changes = {"engine": {"name": parts("GreedyEngine")}}
    limits = stalls_after(1) | {"podium.run.watchdog:GIL_S": 5.0}
    assert server.run("train", merged(tmp_path / "run", changes), constants=limits) == 1
    assert "fault: holds the interpreter" in server.log
    assert "Timeout" in (tmp_path / "run" / "stacks.txt").read_text()
    assert server.run("resume", str(tmp_path / "run"), "--engine.name=inprocess") == 0, server.log


def test_r7_an_engine_that_breaks_off_or_lies_once_is_asked_again_for_the_same_rollouts(
    server: ChaosJobs, tmp_path: Path
) -> None:
    """Token by token. Their logprobs and the weights may differ by rounding, since the rollout is written alone."""
    assert server.run("train", merged(tmp_path / "clean", {})) == 0
    assert server.run("train", merged(tmp_path / "run", {"engine": {"name": parts("FlakyEngine")}})) == 0, server.log
    assert "fault: breaks off" in server.log
    assert "fault: lies" in server.log
    found, clean = all_that_counts(tmp_path / "run"), all_that_counts(tmp_path / "clean")
    retries = [line.pop("rollout/retries") for line in found["metrics"]]
    assert [line.pop("rollout/retries") for line in clean["metrics"]] == [0] * 8
    assert sum(retries) == 1
    weights = [load_file(tmp_path / name / "final" / "adapter_model.safetensors") for name in ("run", "clean")]
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor, weights[1][name], atol=1e-5), name
    for mine, theirs in zip(found.pop("metrics"), clean.pop("metrics"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-5)
    assert [found[key] for key in ("checkpoint", "state")] == [clean[key] for key in ("checkpoint", "state")]
    assert written(tmp_path / "run") == written(tmp_path / "clean")


def written(folder: Path) -> list[list[Any]]:
    """What each rollout of the ledger is, apart from numbers that rounding changes."""
    lines = [
        json.loads(line) for path in sorted((folder / "rollouts").iterdir()) for line in path.read_text().splitlines()
    ]
    return [[line[key] for key in ("ordinal", "sample_index", "seed", "token_ids", "reward")] for line in lines]


def test_b5_a_prompt_that_an_engine_can_never_answer_is_left_out_and_counted(server: ChaosJobs, tmp_path: Path) -> None:
    assert server.run("train", merged(tmp_path / "run", {"engine": {"name": parts("LyingEngine")}})) == 0, server.log
    assert server.log.count("fault: lies") >= 3
    assert "prompts dropped because the engine failed on them: 1" in server.log
    assert [event["ordinal"] for event in events(tmp_path / "run", "dropped_group")] == [5]
    rollouts = [
        json.loads(line)
        for path in sorted((tmp_path / "run" / "rollouts").iterdir())
        for line in path.read_text().splitlines()
    ]
    assert sorted({line["ordinal"] for line in rollouts}) == [0, 1, 2, 3, 4, *range(6, 16)]  # whole or not at all
    assert all(len([line for line in rollouts if line["ordinal"] == n]) == 4 for n in range(16) if n != 5)


def test_d8_weights_that_a_killed_run_left_on_their_way_to_the_engine_are_gone_after_a_resume(
    server: ChaosJobs, tmp_path: Path
) -> None:
    changes = {"sync": {"name": "disk"}, "model": {"lora": False}, "trainer": {"lr": 1e-4}, "run": {"steps": 60}}
    finish = server.start({"arguments": ["train", merged(tmp_path / "run", changes)]})
    wait_until(lambda: len(events(tmp_path / "run", "pushed")) >= 3)
    os.kill(server.pid, signal.SIGKILL)
    assert finish() == -signal.SIGKILL, server.log
    left = sorted(path.name for path in (tmp_path / "run" / "weights").iterdir())
    assert left  # there was something to leave
    assert server.run("resume", str(tmp_path / "run"), "--run.steps=8") == 0, server.log
    assert list((tmp_path / "run").glob("weights/*")) == []


def limit_files() -> None:
    """No file may grow beyond 64 kB: a checkpoint is larger, and the system says EFBIG."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * 1024, 64 * 1024))


def test_d1_a_checkpoint_that_cannot_be_written_ends_the_run_by_its_name(server: ChaosJobs, tmp_path: Path) -> None:
    job = {"prepare": ["tests.chaos.test_faults:limit_files"]}
    assert server.run("train", merged(tmp_path / "run", {}), **job) == 1
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert "CheckpointError: the checkpoint of step 1 cannot be written" in status["message"]
    assert leftovers(tmp_path / "run") == []
    assert server.run("resume", str(tmp_path / "run")) == 0, server.log


def test_d1_a_disk_without_room_for_the_checkpoints_is_told_before_the_run(server: ChaosJobs, tmp_path: Path) -> None:
    changes = {"run": {"steps": 10**9}, "checkpoint": {"every": 1, "keep": 10**9}}
    assert server.run("train", merged(tmp_path / "run", changes)) == 2
    assert "make room, lower checkpoint.keep, or give another folder" in server.log
    assert not (tmp_path / "run").exists()


def test_d4_a_second_run_is_refused_while_the_first_lives_and_its_lock_is_stale_once_it_is_dead(
    server: ChaosJobs, tmp_path: Path
) -> None:
    settings = merged(tmp_path / "run", {"run": {"steps": 1000}})
    finish = server.start({"arguments": ["train", settings]})
    wait_until(lambda: events(tmp_path / "run", "committed"))
    for command in (["train", settings], ["resume", str(tmp_path / "run")]):
        second = podium(*command, folder=ROOT)
        assert second.returncode == 2
        assert "is in use by" in second.stderr
    os.kill(server.pid, signal.SIGKILL)
    assert finish() == -signal.SIGKILL, server.log
    assert server.run("train", settings) == 2
    assert "holds a run that has started" in server.log
    step = events(tmp_path / "run", "committed")[-1]["step"]
    assert server.run("resume", str(tmp_path / "run"), f"--run.steps={step + 1}") == 0, server.log
    assert len(events(tmp_path / "run", "stale_lock")) == 1


AIM = {"KILL_IN_SAVE": "2", "KILL_SEED": "1"}


def test_r13_a_run_that_dies_again_and_again_is_given_up(server: ChaosJobs, tmp_path: Path) -> None:
    tables = tiny_tables(tmp_path / "run")
    tables["reward"] = [{"name": "tests.killing:mortal"}]
    settings = write_tables(tables)
    deadly = {"environment": {"KILL_AT_REWARD_CALL": "3"}, "constants": {"podium.run.start:MAX_RESTARTS": 2}}
    assert server.run("train", settings, **deadly) == -9
    assert server.run("resume", str(tmp_path / "run"), **deadly) == -9
    assert server.run("resume", str(tmp_path / "run"), **deadly) == -9
    assert server.run("resume", str(tmp_path / "run"), **deadly) == 1
    assert "the last 2 resumes of" in server.log
    assert server.run("resume", str(tmp_path / "run")) == 0, server.log
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    assert json.loads((newest / "state.json").read_text())["restarts"] == 3  # the one that was refused is none


def test_the_command_after_a_commit_is_told_which_and_cannot_stop_the_run(server: ChaosJobs, tmp_path: Path) -> None:
    log = tmp_path / "told"
    command = f'echo "$PODIUM_STEP $PODIUM_CHECKPOINT" >> {log}; exit $((PODIUM_STEP == 2))'
    changes = {"checkpoint": {"every": 1, "on_checkpoint": command}, "run": {"steps": 3}}
    assert server.run("train", merged(tmp_path / "run", changes)) == 0, server.log
    expected = [f"{step} {tmp_path / 'run' / 'checkpoints' / f'step-00000{step}'}" for step in (1, 2, 3)]
    assert log.read_text().splitlines() == expected
    assert "warning: checkpoint.on_checkpoint ended with 1 after step 2; the run goes on" in server.log
    assert [event["exit_code"] for event in events(tmp_path / "run", "on_checkpoint")] == [0, 1, 0]


def test_a_run_starts_from_the_weights_of_another_at_step_0(server: ChaosJobs, tmp_path: Path) -> None:
    assert server.run("train", merged(tmp_path / "first", {})) == 0
    for name, place in {"of a run": "first", "of an adapter": "first/final"}.items():
        changes = {"checkpoint": {"every": 1, "start_from": str(tmp_path / place)}, "run": {"steps": 2}}
        assert server.run("train", merged(tmp_path / name, changes)) == 0, server.log
    one, other = (all_that_counts(tmp_path / name) for name in ("of a run", "of an adapter"))
    assert one == other  # the same weights by both ways, so the same run
    assert one["state"]["step"] == 2
    plain = merged(tmp_path / "plain", {"run": {"steps": 2}})
    assert server.run("train", plain) == 0
    assert all_that_counts(tmp_path / "plain")["rollouts"] != one["rollouts"]


def test_a_start_that_is_not_there_or_does_not_fit_is_refused(server: ChaosJobs, tmp_path: Path) -> None:
    assert server.run("train", merged(tmp_path / "first", {"run": {"steps": 1}})) == 0
    cases = {
        "checkpoint.start_from = ": {"checkpoint": {"start_from": str(tmp_path)}},
        "is a LoRA folder, and model.lora = false": {
            "checkpoint": {"start_from": str(tmp_path / "first" / "final")}, "model": {"lora": False},
        },
        "set model.lora.r to that": {
            "checkpoint": {"start_from": str(tmp_path / "first" / "final")}, "model": {"lora": {"r": 4}},
        },
        "other weights than this model trains": {
            "checkpoint": {"start_from": str(tmp_path / "first")}, "model": {"lora": {"r": 4}},
        },
    }  # fmt: skip
    for number, (message, changes) in enumerate(cases.items()):
        assert server.run("train", merged(tmp_path / f"run-{number}", changes)) == 2, message
        assert message in server.log


def test_d6_a_settings_file_that_was_edited_by_hand_is_found(server: ChaosJobs, tmp_path: Path) -> None:
    assert server.run("train", merged(tmp_path / "run", {"run": {"steps": 2}})) == 0
    path = tmp_path / "run" / "settings.toml"
    path.write_text(path.read_text().replace("seed = 0", "seed = 1"))
    assert server.run("resume", str(tmp_path / "run"), "--run.steps=3") == 2
    assert "run.seed cannot change on resume" in server.log


def test_d6_a_change_that_was_insisted_on_holds_after_a_kill(server: ChaosJobs, tmp_path: Path) -> None:
    assert server.run("train", merged(tmp_path / "run", {"run": {"steps": 2}})) == 0
    insist = ("--run.steps=4", "--loss.clip=0.1", "--allow-change", "loss.clip")
    job = {"prepare": ["tests.chaos.faults:kill_in_save"], "environment": AIM | {"KILL_IN_SAVE": "1", "KILL_SEED": "4"}}
    assert server.run("resume", str(tmp_path / "run"), *insist, **job) == -9
    assert server.run("resume", str(tmp_path / "run")) == 0, server.log
    assert next(event["keys"] for event in events(tmp_path / "run", "changed")) == ["loss.clip", "run.steps"]


def test_s5_clocks_that_jump_change_nothing(server: ChaosJobs, tmp_path: Path) -> None:
    assert server.run("train", merged(tmp_path / "clean", {})) == 0
    job = {"prepare": ["tests.chaos.test_faults:jumping_clock"]}
    assert server.run("train", merged(tmp_path / "run", {}), **job, constants=stalls_after(100)) == 0, server.log
    assert all_that_counts(tmp_path / "run") == all_that_counts(tmp_path / "clean")
    times = [event["time"] for event in events(tmp_path / "run")]
    assert sorted(times) != times  # it did jump


def jumping_clock() -> None:
    """A day back, a day forward, with every look."""
    real, looks = time.time, iter(range(10**9))
    time.time = lambda: real() + (-1) ** next(looks) * 86_400
