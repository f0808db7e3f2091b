"""What the chaos tests share: commands with a mark, small runs, and what must be equal in the end."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w

from tests import forked_keepers
from tests.commands import ROOT, fork_server

MARK = "PODIUM_CHAOS_RUN"
"""In the environment of every process that a job starts, to find what it leaves behind."""

MANY_RESTARTS = {"podium.run.start:MAX_RESTARTS": 1000}


def stalls_after(seconds: float) -> dict[str, float]:
    """Constants of a job whose watchdog waits so long."""
    return {"podium.run.watchdog:STALL_S": seconds, "podium.run.watchdog:SLOWEST_TOKEN_S": 0.0}


class ChaosJobs:
    """Commands one after the other; `mark` is in the environment of all that they start."""

    def __init__(self, scratch: Path) -> None:
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self._log = scratch / "jobs.log"
        fork_server()

    def run(self, *arguments: str, **job: Any) -> int:
        """The exit status of `podium ARGUMENTS`; negative for a signal."""
        return self.start({"arguments": list(arguments), **job})()

    def start(self, job: dict[str, Any]) -> Callable[[], int]:
        """Begins a job; what it returns waits for its end. `pid` is the job's."""
        self._log.unlink(missing_ok=True)
        environment = os.environ | {MARK: self.mark, forked_keepers.MARK: self.mark, **job.get("environment", {})}
        process = fork_server().start(
            stdout=self._log,
            stderr=self._log,
            folder=ROOT,
            **job | {"environment": environment, "constants": MANY_RESTARTS | job.get("constants", {})},
        )
        self.pid = process.pid
        return process.wait

    @property
    def log(self) -> str:
        """The end of what the job printed."""
        return self._log.read_text()[-4000:] if self._log.exists() else ""


def tiny_tables(folder: Path, **run: Any) -> dict[str, Any]:
    """A run of a second: 2 prompts × 4 rollouts a step, 12 rows, a commit a step."""
    return {
        "run": {
            "folder": str(folder),
            "steps": 8,
            "prompts_per_step": 2,
            "rollouts_per_prompt": 4,
            **run,
        },
        "model": {"name": "embedded", "device": "cpu"},
        "data": [{"name": "arithmetic", "max_rows": 12}],
        "reward": [{"name": "arithmetic"}],
        "rollout": {"max_new_tokens": 24},
        "trainer": {"lr": 5e-4},
        "checkpoint": {"every": 1, "keep": 2},
        "report": [{"name": "console"}],
    }


def write_tables(tables: dict[str, Any]) -> str:
    """The settings file beside the run's folder."""
    path = Path(f"{tables['run']['folder']}.toml")
    path.write_text(tomli_w.dumps(tables))
    return str(path)


def all_that_counts(folder: Path) -> dict[str, Any]:
    """Every bit that must not depend on faults: weights, optimizer, random states, counters, ledger, trained model."""
    newest = max(path for path in (folder / "checkpoints").iterdir() if path.name.startswith("step-"))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    state = json.loads((newest / "state.json").read_text())["state"]
    assert state["policy_version"] > 0, "nothing was trained, so nothing is shown"
    timed = ("time/", "perf/")
    return {
        "checkpoint": newest.name,
        "trainer": _hash(newest / "trainer.safetensors"),
        "state": state,
        "rollouts": {path.name: _hash(path) for path in sorted((folder / "rollouts").iterdir())},
        "metrics": [
            {k: v for k, v in line.items() if not k.startswith(timed) and "per_s" not in k} for line in metrics
        ],
        "final": {path.name: _hash(path) for path in sorted((folder / "final").iterdir())},
    }


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """Lines of events.jsonl; one that a kill cut off is left out."""
    made = []
    for line in (folder / "events.jsonl").read_text().splitlines() if (folder / "events.jsonl").exists() else ():
        try:
            made.append(json.loads(line))
        except ValueError:
            continue
    return [event for event in made if not kinds or event["event"] in kinds]


def left_behind(mark: str, timeout_s: float = 5.0) -> list[int]:
    """Processes with that mark that are still there after the time that they are given."""
    deadline = time.monotonic() + timeout_s
    while (found := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _marked(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(") ")[2][0]
                is_one = f"{MARK}={mark}".encode() in environment or forked_keepers.holds_mark(str(entry), mark)
            except OSError:  # gone in the meantime
                continue
            if is_one and state != "Z":
                found.append(int(entry.name))
    return found


def leftovers(folder: Path) -> list[str]:
    """Half-written things."""
    return sorted(path.name for path in folder.rglob("*.tmp-*"))


def wait_until(condition: Callable[[], Any], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
