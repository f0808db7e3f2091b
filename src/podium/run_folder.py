"""A run is a folder: its files by name, its lock and its status.

settings.toml  status.json  metrics.jsonl  events.jsonl  tokens.jsonl  restarts.json  stacks.txt  report.html
rollouts/  evals/  checkpoints/  final/  flyte/
"""

import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from podium.errors import InputError, StorageError
from podium.files import open_regular, read_regular

OUTSIDE = "flyte"
"""What may lie in the folder before the run begins: the store of a runtime that is started around it."""


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings = path / "settings.toml"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.tokens = path / "tokens.jsonl"
        self.rollouts = path / "rollouts"
        self.evals = path / "evals"
        self.checkpoints = path / "checkpoints"
        self.final = path / "final"
        self.page = path / "report.html"
        self.outside = path / OUTSIDE
        self.stacks = path / "stacks.txt"
        self._status = path / "status.json"
        self._restarts = path / "restarts.json"
        self._lock: Any = None
        self._directory = -1
        """While it is locked: the folder itself, whatever is at its path."""
        self.allowed_changes: tuple[str, ...] = ()
        """Settings that may differ from the checkpoint's in spite of the rules."""

    def refuse_if_used(self) -> None:
        """A new run needs a folder that holds nothing, so that nothing is ever overwritten."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"run.folder = {str(self.path)!r} is a file; give a new folder")
        if self.path.is_dir() and {entry.name for entry in self.path.iterdir()} - {OUTSIDE}:
            raise InputError(f"run.folder = {str(self.path)!r} {self._what_it_holds()}")

    def create(self) -> None:
        """Makes the folder and locks it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"run.folder = {str(self.path)!r} cannot be made: {error.strerror}") from None
        self.lock()
        if {entry.name for entry in self.path.iterdir()} - {OUTSIDE} != {"lock"}:  # another run was quicker
            self.unlock()
            self.refuse_if_used()

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """An existing run's folder, not locked yet."""
        folder = cls(path)
        if not folder.settings.is_file():
            raise InputError(f"{path} is not a run folder: it has no settings.toml")
        return folder

    def lock(self) -> None:
        """Held until this process ends, however it ends; a second run is refused."""
        try:
            handle = (self.path / "lock").open("a+")
        except OSError as error:
            raise InputError(f"{self.path} cannot be written to: {error.strerror}") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.seek(0)
            owner = handle.read().strip() or "another process"
            handle.close()
            raise InputError(
                f"{self.path} is in use by {owner}; wait for it, stop it, or give another folder"
            ) from None
        handle.seek(0)
        if left := handle.read().strip():  # the system gave the lock back when that process died
            self.event("stale_lock", owner=left)
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {socket.gethostname()}")
        handle.flush()
        self._directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._lock = handle

    def unlock(self) -> None:
        if self._lock is not None:
            with suppress(OSError):  # a full disk: then the lock only looks stale
                self._lock.truncate(0)
            self._lock.close()
            os.close(self._directory)
            self._lock = None

    @property
    def run_id(self) -> str:
        """Tells runs apart; the same before and after a resume."""
        place = f"{socket.gethostname()}:{self.path.resolve()}"
        return f"{self.path.name}-{hashlib.blake2b(place.encode(), digest_size=6).hexdigest()}"

    @property
    def state(self) -> str:
        """ "running", "finished", "stopped", "failed", or "" where none was written."""
        return str(self.status.get("state", ""))

    @property
    def restarts(self) -> int:
        """How often the run was taken up again."""
        return self._read_restarts()["total"]

    def count_restart(self) -> int:
        """One more; returns how many in a row, this one not counted, ended before a commit."""
        before = self._read_restarts()
        now = {"total": before["total"] + 1, "in_a_row": before["in_a_row"] + 1}
        write_atomically(self._restarts, json.dumps(now))
        return before["in_a_row"]

    def uncount_restart(self) -> None:
        """The last one was refused, so it was none."""
        before = self._read_restarts()
        if before["total"] <= 1:
            self._restarts.unlink(missing_ok=True)
        else:
            now = {"total": before["total"] - 1, "in_a_row": max(0, before["in_a_row"] - 1)}
            write_atomically(self._restarts, json.dumps(now))

    def note_progress(self) -> None:
        """The run got on, or ended in good order: restarts in a row are counted from 0 again."""
        before = self._read_restarts()
        if before["in_a_row"]:
            write_atomically(self._restarts, json.dumps({**before, "in_a_row": 0}))

    def _read_restarts(self) -> dict[str, int]:
        try:
            return json.loads(read_regular(self._restarts))
        except (OSError, ValueError):
            return {"total": 0, "in_a_row": 0}

    @property
    def status(self) -> dict[str, Any]:
        """What status.json says; empty where none was written."""
        try:
            status = json.loads(read_regular(self._status))
        except (OSError, ValueError, RecursionError):
            return {}
        return status if isinstance(status, dict) else {}

    def fail(self, message: str) -> None:
        """The status of a run that broke, at the step it had reached."""
        status = self.status or {"step": 0, "percent": 0.0}
        write_atomically(self._status, json.dumps({**status, "state": "failed", "message": message}))

    def write_status(self, state: str, step: int, steps: int, message: str = "") -> None:
        status = {
            "state": state,
            "step": step,
            "steps": steps,
            "percent": 100.0 if state == "finished" else round(100 * step / steps, 1),
            "message": message,
            "pid": os.getpid(),
            "time": time.time(),
        }
        write_atomically(self._status, json.dumps(status))

    def event(self, kind: str, **details: Any) -> None:
        """One line in events.jsonl: what happened, for people and for tests of faults."""
        self.check_there()
        with self.events.open("a") as file:
            file.write(json.dumps({"time": time.time(), "event": kind, **details}) + "\n")

    def check_there(self) -> None:
        """A run whose folder was deleted must not go on in a new one that lacks all it had written."""
        if self.is_gone():
            raise StorageError(
                f"{self.path} was deleted, moved or emptied while the run wrote to it; what was trained since the last "
                "copy of it is lost. Put a copy back and resume it, or start a new run"
            )

    def is_gone(self) -> bool:
        """Whether the folder that this process locked is not at its path any more, or has nothing left in it."""
        if self._lock is None:
            return False
        try:
            is_same = os.path.samestat(os.stat(self.path), os.fstat(self._directory))
        except OSError:
            return True
        return not is_same or not ((self.path / "lock").exists() or self.settings.exists())

    def has_event(self, kind: str) -> bool:
        """By text: the last line may have been cut off by a kill."""
        return self.events.exists() and f'"event": "{kind}"' in self.events.read_text()

    def events_of(self, kind: str) -> Iterator[dict[str, Any]]:
        """The lines of one kind; one that was cut off by a kill is passed over."""
        for line in self.events.read_text().splitlines() if self.events.exists() else ():
            with suppress(ValueError):
                event = json.loads(line)
                if event["event"] == kind:
                    yield event

    def leftovers(self) -> list[Path]:
        return [*self.path.glob("*.tmp-*"), *self.checkpoints.glob("*.tmp-*"), *self.path.glob("weights")]

    def clean_up(self) -> None:
        """Removes what a killed process left: files half-written, and weights on their way to its engine."""
        for leftover in self.leftovers():
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    def _what_it_holds(self) -> str:
        if self.is_locked():
            return "is in use by another run; wait for it, stop it, or give a new folder"
        if not self.settings.is_file():
            return "is not empty; give a new folder"
        if self.state == "finished":
            return "holds a finished run; give a new folder, or `podium resume` it with more run.steps"
        return "holds a run that has begun; go on with it by `podium resume`, or give a new folder"

    def is_locked(self) -> bool:
        """Whether a process is at work here; asks without leaving a trace."""
        try:
            handle = open_regular(self.path / "lock")
        except OSError:
            return False
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
        return False


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, never a part."""
    unfinished = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
