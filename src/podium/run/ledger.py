"""What a run did, on disk: one line of metrics per step, and every rollout exactly once.

A checkpoint stores the ledger's length and sha256. A resume truncates what came after and verifies that the rest is
unchanged. So each trained rollout is recorded exactly once, however often the run was killed.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from podium.errors import CheckpointError
from podium.run.folder import RunFolder, write_atomically

LINE_ENDS = ("\x85", "\u2028", "\u2029")
"""Line ends that JSON does not escape, but at which Python's str.splitlines splits."""


class Ledger:
    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._metrics_hash = hashlib.sha256()
        self._metrics_bytes = 0
        self._rollouts_hash = hashlib.sha256()
        self._rollout_files = 0
        self._written: set[Path] = set()

    def add_line(self, line: Mapping[str, Any]) -> None:
        """Appends to metrics.jsonl."""
        data = _json_line(line)
        with self._folder.metrics.open("ab") as file:
            file.write(data)
        self._metrics_hash.update(data)
        self._metrics_bytes += len(data)
        self._written.add(self._folder.metrics)

    def add_rollouts(self, step: int, rollouts: Sequence[Mapping[str, Any]]) -> None:
        """Writes rollouts/step-000001.jsonl, one line per rollout."""
        data = b"".join(map(_json_line, rollouts))
        self._folder.rollouts.mkdir(exist_ok=True)
        self._step_file(step).write_bytes(data)
        self._rollouts_hash.update(data)
        self._rollout_files += 1
        self._written |= {self._step_file(step), self._folder.rollouts}

    def add_held_out(self, step: int, rollouts: Sequence[Mapping[str, Any]]) -> None:
        """Writes evals/step-000010.jsonl. A checkpoint does not verify it: a repeated evaluation writes the same."""
        self._folder.evals.mkdir(exist_ok=True)
        lines = b"".join(map(_json_line, rollouts))
        write_atomically(self._folder.evals / f"step-{step:06d}.jsonl", lines.decode())

    def position(self) -> dict[str, Any]:
        """What a checkpoint stores about the ledger."""
        return {
            "metrics_bytes": self._metrics_bytes,
            "metrics_sha256": self._metrics_hash.hexdigest(),
            "rollout_files": self._rollout_files,
            "rollouts_sha256": self._rollouts_hash.hexdigest(),
        }

    def unflushed(self) -> list[Path]:
        """Files and folders written since the last call, for a checkpoint to flush to disk."""
        paths, self._written = self._written, set()
        return [path for path in sorted(paths) if path.exists()]

    def check(self, position: Mapping[str, Any]) -> None:
        """Raises `CheckpointError` unless the ledger up to a stored position is unchanged; writes nothing."""
        Ledger(self._folder)._read_up_to(position)

    def rewind(self, position: Mapping[str, Any] | None) -> None:
        """Truncates the ledger to a stored position, or to the start of the run for None, after checking the rest."""
        length, files = (position["metrics_bytes"], position["rollout_files"]) if position else (0, 0)
        self._read_up_to(position)
        if self._folder.metrics.exists():
            os.truncate(self._folder.metrics, length)
        for path in self._rollout_paths()[files:]:
            path.unlink()

    def _read_up_to(self, position: Mapping[str, Any] | None) -> None:
        length, files = (position["metrics_bytes"], position["rollout_files"]) if position else (0, 0)
        paths = self._rollout_paths()
        has_lines = length and self._folder.metrics.exists()  # a missing file shows as a difference below
        kept = self._folder.metrics.read_bytes()[:length] if has_lines else b""
        self._metrics_hash, self._metrics_bytes = hashlib.sha256(kept), len(kept)
        self._rollouts_hash, self._rollout_files = hashlib.sha256(), min(files, len(paths))
        for path in paths[:files]:
            self._rollouts_hash.update(path.read_bytes())
        if position is not None and self.position() != dict(position):
            raise CheckpointError(
                f"metrics.jsonl or rollouts/ in {self._folder.path} was changed or deleted since the checkpoint; "
                "restore those files, or start a new run"
            )

    def _rollout_paths(self) -> list[Path]:
        return sorted(self._folder.rollouts.glob("step-*.jsonl"))

    def history(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        if not self._folder.metrics.exists():
            return []
        return [json.loads(line) for line in self._folder.metrics.read_bytes().splitlines()]

    def _step_file(self, step: int) -> Path:
        return self._folder.rollouts / f"step-{step:06d}.jsonl"


def _json_line(value: Mapping[str, Any]) -> bytes:
    """Uses orjson, which is five times as fast, and Python's json for what orjson rejects, such as a lone surrogate."""
    try:
        line = orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        return (json.dumps(value) + "\n").encode()
    for mark in LINE_ENDS:
        line = line.replace(mark.encode(), b"\\u%04x" % ord(mark))
    return line
