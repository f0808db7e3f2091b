"""A run is a folder: its files, its lock and its status.

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
from podium.remote.files import open_regular, read_regular

OUTSIDE = "flyte"
"""May exist in the folder before the run starts: the store of a runtime that starts the run."""


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
        """While locked: a handle on the folder itself, which stays valid if the path is replaced."""
        self.allowed_changes: tuple[str, ...] = ()
        """Settings that may differ from the checkpoint's, although the resume rules forbid it."""

    def refuse_if_used(self) -> None:
        """A new run needs an empty folder, so that nothing is ever overwritten."""
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
        if {entry.name for entry in self.path.iterdir()} - {OUTSIDE} != {"lock"}:  # another run was faster
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
        """Locks the folder until this process ends, however it ends; a second run is rejected."""
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
        if left := handle.read().strip():  # the system released the lock when that process died
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
        """ "running", "finished", "stopped" or "failed"; "" if there is no status file."""
        return str(self.status.get("state", ""))

    @property
    def restarts(self) -> int:
        """How often the run was resumed."""
        return self._read_restarts()["total"]

    def count_restart(self) -> int:
        """Counts a resume; returns how many resumes in a row before this one ended before a commit."""
        before = self._read_restarts()
        now = {"total": before["total"] + 1, "in_a_row": before["in_a_row"] + 1}
        write_atomically(self._restarts, json.dumps(now))
        return before["in_a_row"]

    def uncount_restart(self) -> None:
        """The last resume was rejected and does not count."""
        before = self._read_restarts()
        if before["total"] <= 1:
            self._restarts.unlink(missing_ok=True)
        else:
            now = {"total": before["total"] - 1, "in_a_row": max(0, before["in_a_row"] - 1)}
            write_atomically(self._restarts, json.dumps(now))

    def note_progress(self) -> None:
        """The run made progress or ended normally: resumes in a row are counted from 0 again."""
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
        """The contents of status.json; empty if there is none."""
        try:
            status = json.loads(read_regular(self._status))
        except (OSError, ValueError, RecursionError):
            return {}
        return status if isinstance(status, dict) else {}

    def fail(self, message: str) -> None:
        """Writes the status of a run that broke, at the step that it had reached."""
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
        """A run whose folder was deleted must not continue in a new folder that lacks what it had written."""
        if self.is_gone():
            raise StorageError(
                f"{self.path} was deleted, moved or emptied while the run wrote to it; what was trained since the "
                "last copy of the folder is lost. Restore a copy and resume it, or start a new run"
            )

    def is_gone(self) -> bool:
        """Whether the folder that this process locked is no longer at its path, or is empty."""
        if self._lock is None:
            return False
        try:
            is_same = os.path.samestat(os.stat(self.path), os.fstat(self._directory))
        except OSError:
            return True
        return not is_same or not ((self.path / "lock").exists() or self.settings.exists())

    def has_event(self, kind: str) -> bool:
        """Searches the text: a kill may have truncated the last line."""
        return self.events.exists() and f'"event": "{kind}"' in self.events.read_text()

    def events_of(self, kind: str) -> Iterator[dict[str, Any]]:
        """The events of one kind; a line that a kill truncated is skipped."""
        for line in self.events.read_text().splitlines() if self.events.exists() else ():
            with suppress(ValueError):
                event = json.loads(line)
                if event["event"] == kind:
                    yield event

    def leftovers(self) -> list[Path]:
        return [*self.path.glob("*.tmp-*"), *self.checkpoints.glob("*.tmp-*"), *self.path.glob("weights")]

    def clean_up(self) -> None:
        """Removes what a killed process left: unfinished files, and weights published for its engine."""
        for leftover in self.leftovers():
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    def _what_it_holds(self) -> str:
        if self.is_locked():
            return "is in use by another run; wait for it, stop it, or give a new folder"
        if not self.settings.is_file():
            return "is not empty; give a new folder"
        if self.state == "finished":
            return "holds a finished run; give a new folder, or `podium resume` it with more run.steps"
        return "holds a run that has started; continue it with `podium resume`, or give a new folder"

    def is_locked(self) -> bool:
        """Whether a process holds the lock; the check itself changes nothing."""
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
