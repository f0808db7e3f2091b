"""G5, R6, R12: a signal ends a run with a commit, within its grace time; a second one at once; nothing outlives it."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.harness import (
    ROOT,
    ChaosJobs,
    all_that_counts,
    events,
    left_behind,
    tiny_tables,
    wait_until,
    write_tables,
)

SIGNALS = 8


def long_run(folder: Path, **changes: Any) -> str:
    """Commits are due in a thousand steps: the one that is found is the signal's."""
    tables = tiny_tables(folder, steps=1000) | {"checkpoint": {"every": 1000}}
    for section, given in changes.items():
        tables[section] = {**tables.get(section, {}), **given} if isinstance(given, dict) else given
    return write_tables(tables)


@pytest.mark.parametrize("number", range(SIGNALS))
def test_g5_a_signal_at_a_random_moment_costs_at_most_one_step(number: int, server: ChaosJobs, tmp_path: Path) -> None:
    rng = random.Random(number)
    run, kind = tmp_path / "run", rng.choice([signal.SIGTERM, signal.SIGINT])
    finish = server.start({"arguments": ["train", long_run(run)]})
    wait_until(lambda: len(events(run, "trained")) >= 2)
    time.sleep(rng.uniform(0, 0.5))
    begun = len(events(run, "training"))
    os.kill(server.pid, kind)
    assert finish() == 128 + kind, server.log
    [committed] = events(run, "committed")
    assert committed["step"] >= begun - 1
    assert committed["step"] == len(events(run, "trained"))  # what was trained is kept
    assert [event["step"] for event in events(run, "stopped")] == [committed["step"]]
    if number == 0:
        end = committed["step"] + 2
        assert server.run("resume", str(run), f"--run.steps={end}") == 0, server.log
        whole = tiny_tables(tmp_path / "whole", steps=end) | {"checkpoint": {"every": 1000}}
        assert server.run("train", write_tables(whole)) == 0
        assert all_that_counts(run) == all_that_counts(tmp_path / "whole")


def test_r6_a_signal_in_the_first_evaluation_does_not_make_it_count_twice(server: ChaosJobs, tmp_path: Path) -> None:
    held_out = {"data": [{"name": "arithmetic", "split": "held_out", "max_rows": 60}]}
    tables = tiny_tables(tmp_path / "run", steps=2) | {"eval": held_out}
    finish = server.start({"arguments": ["train", write_tables(tables)]})
    wait_until(lambda: events(tmp_path / "run", "started"))
    os.kill(server.pid, signal.SIGTERM)
    assert finish() == 143, server.log
    assert events(tmp_path / "run", "training") == []
    assert server.run("resume", str(tmp_path / "run")) == 0, server.log
    tables = tiny_tables(tmp_path / "whole", steps=2) | {"eval": held_out}
    assert server.run("train", write_tables(tables)) == 0
    assert all_that_counts(tmp_path / "run") == all_that_counts(tmp_path / "whole")


def test_r6_when_the_grace_time_is_over_the_process_ends_as_it_is(server: ChaosJobs, tmp_path: Path) -> None:
    slow = {"name": "tests.chaos.parts:EndlessTrainer"}
    finish = server.start(
        {
            "arguments": ["train", long_run(tmp_path / "run", trainer=slow)],
            "constants": {"podium.observer:GRACE_S": 1.0},
        }
    )
    wait_until(lambda: "fault: trains for ever" in server.log)
    started = time.monotonic()
    os.kill(server.pid, signal.SIGTERM)
    assert finish() == 143
    assert 1.0 <= time.monotonic() - started < 30
    assert "the 1 s to stop are over" in server.log


def test_r6_a_thread_that_is_stuck_does_not_keep_the_process(tmp_path: Path) -> None:
    """The command line itself: Python waits for threads when it ends."""
    stuck = {"name": "tests.chaos.parts:StuckEngine"}
    command = [sys.executable, "-m", "podium.cli", "train", long_run(tmp_path / "run", engine=stuck)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    while "fault: is stuck" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    assert "s to stop are over" not in process.stderr.read()
    process.stderr.close()
    assert [event["step"] for event in events(tmp_path / "run", "committed")] == [2]  # sampling was given up at once


def test_r6_a_second_signal_ends_it_at_once(server: ChaosJobs, tmp_path: Path) -> None:
    """A training step that never ends: the first signal waits for it."""
    slow = {"name": "tests.chaos.parts:EndlessTrainer"}
    finish = server.start(
        {
            "arguments": ["train", long_run(tmp_path / "run", trainer=slow)],
            "constants": {"podium.observer:GRACE_S": 600.0},
        }
    )
    wait_until(lambda: "fault: trains for ever" in server.log)
    os.kill(server.pid, signal.SIGINT)
    wait_until(lambda: "stopping at the next safe point" in server.log)
    started = time.monotonic()
    os.kill(server.pid, signal.SIGINT)
    assert finish() == 130
    assert time.monotonic() - started < 30
    assert events(tmp_path / "run", "committed") == []


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_r12_children_die_with_the_driver(kind: int, server: ChaosJobs, tmp_path: Path) -> None:
    """Reward workers and the command of a checkpoint."""
    reward = [{"name": "tests.chaos.rewards:in_a_process"}]
    checkpoint = {"every": 1, "on_checkpoint": "echo sleeping; sleep 600"}
    settings = long_run(tmp_path / "run", reward=reward, checkpoint=checkpoint)
    finish = server.start({"arguments": ["train", settings]})
    wait_until(lambda: "sleeping" in server.log and events(tmp_path / "run", "trained"))
    assert len(left_behind(server.mark, timeout_s=0)) >= 2  # the template of the workers and the command are there
    os.kill(server.pid, kind)
    if kind == signal.SIGTERM:
        time.sleep(0.5)
        os.kill(server.pid, kind)  # the commit would wait for the command
    assert finish() in (-9, 143)
    assert left_behind(server.mark, timeout_s=5) == []
