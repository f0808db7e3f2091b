"""Runs of the command line with a pool, whose workers are killed from outside."""

import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import forked_keepers
from tests.commands import Process, fork_server

SETTINGS = """
[run]
steps = 100000
prompts_per_step = 8
rollouts_per_prompt = 4
[model]
device = "cpu"
[rollout]
max_new_tokens = 48
[trainer]
lr = 1e-7
[checkpoint]
every = 0
[[data]]
name = "arithmetic"
max_rows = 1000
[[reward]]
name = "arithmetic"
[engine]
name = "pool"
"""
LOCAL = SETTINGS.replace('[engine]\nname = "pool"\n', "")
"""The same run with the engine in its own process."""


@dataclass
class Run:
    """`tmp` is its temporary folder and nobody else's, by which its processes are known too."""

    folder: Path
    tmp: Path
    process: Process
    stderr: Path
    kills: list[dict[str, Any]] = field(default_factory=list)
    _events: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0
    """Bytes of the event log."""

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError), (self.folder / "events.jsonl").open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]  # the last line may be on its way
            self._events += [json.loads(line) for line in whole.splitlines()]
            self._read += len(whole) + 1 if whole else 0
        return [event for event in self._events if kind in (None, event["event"])]

    def until(self, holds: Any, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not holds():
            assert self.process.poll() is None, self.stderr.read_text()
            assert time.monotonic() < deadline, f"not within {limit_s} s: {self.events()[-5:]}"
            time.sleep(0.02)

    def living(self) -> dict[str, int]:
        """Workers in service, by name, with their pids."""
        started = {event["worker"]: event["pid"] for event in self.events("worker_started")}
        for event in self.events("worker_lost"):
            started.pop(event["worker"], None)
        return started

    def kill(self, name: str, pid: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            self.kills.append({"worker": name, "signal": number, "time": time.time()})

    def unstruck(self) -> dict[str, int]:
        struck = {kill["worker"] for kill in self.kills}
        return {name: pid for name, pid in self.living().items() if name not in struck}

    def kill_one(self, choice: random.Random, number: int) -> None:
        """A worker that has not been struck yet."""
        fresh = self.unstruck()
        name = choice.choice(sorted(fresh))
        self.kill(name, fresh[name], number)

    def num_outstanding(self) -> int:
        """Prompts that are being written."""
        sent = sum(len(event["ordinals"]) for event in self.events("sampling"))
        return sent - len(self.events("group"))

    def kill_in_mid_rollout(self, on_killed: Callable[[], None] = lambda: None, limit_s: float = 180) -> None:
        """The pool's only worker while it writes, known by the requests that are sent again; then waits for another,
        and for every process that the victim had started to be gone. A kill that came too late is made again."""
        sent_again = len(self.events("redispatched"))
        while len(self.events("redispatched")) == sent_again:
            lost, groups = len(self.events("worker_lost")), len(self.events("group"))
            self.until(lambda: self.living() and self.num_outstanding() > 0, limit_s)
            [(name, pid)] = self.living().items()
            self.kill(name, pid, signal.SIGKILL)
            on_killed()
            self.until(lambda lost=lost: len(self.events("worker_lost")) > lost, 10)
            self.until(lambda pid=pid: not _session(pid), 10)
            self.until(lambda: len(self.living()) == 1, limit_s)
            self.until(lambda groups=groups: len(self.events("group")) > groups, limit_s)  # and it answers

    def stop(self, limit_s: float = 60) -> int:
        """At the next safe point."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(limit_s)

    def ledger(self) -> list[bytes]:
        """The rollouts of each step, as they stand on disk."""
        return [path.read_bytes() for path in sorted((self.folder / "rollouts").glob("step-*.jsonl"))]

    def num_steps(self) -> int:
        return len(list((self.folder / "rollouts").glob("step-*.jsonl")))

    def processes(self) -> list[int]:
        """The driver, and all that have this run's temporary folder in their environment, or files open in it: a
        process that writes a title for itself writes over its environment, and a forked one does not show it."""
        driver = self.process.pid if self.process.poll() is None else None
        mark, found = f"TMPDIR={self.tmp}".encode(), []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_one = mark in (process / "environ").read_bytes() or _has_open(process, self.tmp)
                if is_one or int(process.name) == driver:
                    found.append(int(process.name))
        return found

    def keeper(self) -> int:
        """The parent of the workers."""
        [pid] = {_parent(pid) for pid in self.living().values()}
        return pid

    def left_behind(self, within_s: float = 5.0) -> list[Any]:
        """Processes and files, so long after the end."""
        deadline = time.monotonic() + within_s
        while (left := [*self.processes(), *self.tmp.iterdir()]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [_command(each) if isinstance(each, int) else each for each in left]


def _has_open(process: Path, folder: Path) -> bool:
    for link in (process / "fd").iterdir():
        with suppress(OSError):  # closed by now
            if os.readlink(link).removeprefix("/memfd:").startswith(str(folder)):
                return True
    return False


def _command(pid: int) -> str:
    """For a message: what a process is."""
    with suppress(OSError):
        parts = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return f"{pid}: {b' '.join(parts).decode(errors='replace')[:200]}"
    return f"{pid}: gone by now"


@contextmanager
def a_run(
    folder: Path, *flags: str, settings: str = SETTINGS, is_fresh: bool = False, modules: tuple[str, ...] = ()
) -> Iterator[Run]:
    """`podium train`, forked from a process that has imported the `modules`. So is the process that forks a pool's
    workers (tests/forked_keepers.py), unless it `is_fresh`: then that is an interpreter of its own, as for a user."""
    has_pool = settings == SETTINGS and not is_fresh
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.toml").write_text(settings)
    with tempfile.TemporaryDirectory(prefix="pt-", dir="/tmp") as tmp:
        stderr = folder / "stderr"
        process = fork_server(*modules).start(
            *("train", str(folder / "settings.toml"), "--quiet", f"--run.folder={folder / 'run'}", *flags),
            stdout=stderr,
            stderr=stderr,
            environment=os.environ | {"TMPDIR": tmp, forked_keepers.MARK: tmp},
            prepare=["tests.forked_keepers:instead_of_interpreters"] if has_pool else [],
        )
        run = Run(folder / "run", Path(tmp), process, stderr)
        try:
            yield run
        finally:
            run.process.kill()
            run.process.wait()
            for pid in run.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _session(leader: int) -> list[int]:
    """Living processes of a worker's own session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, session = path.read_text().rpartition(") ")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(path.parent.name))
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
