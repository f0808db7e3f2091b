"""Stage 9: the one atomic commit, and the way back.

A checkpoint is a folder with weights, optimizer and random states (`trainer.safetensors`), where the run and its
ledger stand (`state.json`) and the sha256 of both (`manifest.json`). It is written beside its place, flushed to disk
and renamed; so there is either a whole checkpoint or none. The newest is computed from the names, never stored.
"""

import asyncio
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from podium.errors import CheckpointError, InputError
from podium.ledger import Ledger
from podium.records import RunState
from podium.run_folder import RunFolder
from podium.stages import Trainer

FORMAT = 1
MANIFEST = "manifest.json"
FILES = {"state.json", "trainer.safetensors"}
"""What the manifest lists."""


class FolderCheckpoint:
    """`warn` is told of a checkpoint that is damaged."""

    def __init__(
        self,
        folder: RunFolder,
        trainer: Trainer,
        ledger: Ledger,
        data_fingerprint: str,
        *,
        every: int,
        keep: int,
        step: int | None = None,
        warn: Callable[[str], None] = print,
    ) -> None:
        """`step` names the checkpoint to restore; by default the newest that can be trusted."""
        self._folder, self._trainer, self._ledger = folder, trainer, ledger
        self._data_fingerprint, self._every, self._keep = data_fingerprint, every, keep
        self._wanted_step, self._warn = step, warn
        self._last_committed: int | None = None

    async def restore_or_start(self) -> RunState:
        self._folder.clean_up()
        chosen = self._choose()
        if chosen is None:
            self._ledger.rewind(None)
            return RunState()
        saved = json.loads((chosen / "state.json").read_text())
        if saved["format"] != FORMAT:
            raise CheckpointError(
                f"{chosen} has format {saved['format']}; this version of Podium reads format {FORMAT}"
            )
        if saved["data_fingerprint"] != self._data_fingerprint:
            raise InputError("the data is not what this run was trained on; restore it, or start a new run")
        self._trainer.load_state(load_file(chosen / "trainer.safetensors"))
        listed = {key: tuple(saved["state"].get(key, ())) for key in ("retired", "pending")}
        state = RunState(**saved["state"] | listed)
        self._ledger.check(saved["ledger"])
        self._set_aside(state.step)  # before the ledger is cut: killed in between, this one is still the newest
        self._ledger.rewind(saved["ledger"])
        self._last_committed = state.step
        self._folder.event("restored", step=state.step, checkpoint=chosen.name)
        return state

    async def commit_if_due(self, state: RunState) -> None:
        """Due once `every` steps have passed since the last commit; a window may carry it past the exact multiple."""
        if self._every and state.step // self._every > (self._last_committed or 0) // self._every:
            await self.commit(state)

    async def commit(self, state: RunState) -> None:
        if self._last_committed == state.step:
            return
        try:
            await asyncio.to_thread(self._write, state)
        except (OSError, SafetensorError) as error:
            self._folder.clean_up()
            raise CheckpointError(
                f"the checkpoint of step {state.step} cannot be written: {error}; the ones before it are untouched"
            ) from None
        self._last_committed = state.step
        self._folder.event("committed", step=state.step)
        self._retire()

    async def finish(self, state: RunState) -> None:
        await self.commit(state)
        unfinished = self._folder.path / f"final.tmp-{os.getpid()}"
        shutil.rmtree(unfinished, ignore_errors=True)
        self._trainer.save_model(str(unfinished))
        if self._folder.final.exists():
            shutil.rmtree(self._folder.final)
        unfinished.rename(self._folder.final)

    def _write(self, state: RunState) -> None:
        place = self._folder.checkpoints / f"step-{state.step:06d}"
        unfinished = place.with_name(f"{place.name}.tmp-{os.getpid()}")
        unfinished.mkdir(parents=True)
        save_file(dict(self._trainer.state()), unfinished / "trainer.safetensors")
        saved = {
            "format": FORMAT,
            "state": asdict(state),
            "data_fingerprint": self._data_fingerprint,
            "ledger": self._ledger.position(),
        }
        (unfinished / "state.json").write_text(json.dumps(saved))
        files = {path.name: describe_file(path) for path in sorted(unfinished.iterdir())}
        (unfinished / MANIFEST).write_text(json.dumps(files, indent=1))
        for path in (*unfinished.iterdir(), unfinished, *self._ledger.unflushed()):
            flush(path)
        unfinished.rename(place)
        flush(place.parent)

    def _retire(self) -> None:
        """Deletes the oldest checkpoints, and only once the newest is known to be readable."""
        *old, newest = self._all()
        complaint = find_damage(newest)
        if complaint:
            raise CheckpointError(f"{newest} was just written and is damaged: {complaint}; check the disk")
        for path in old[: max(0, len(old) + 1 - self._keep)]:
            shutil.rmtree(path)

    def _choose(self) -> Path | None:
        """The checkpoint to go on from; None only if there has never been one."""
        every = self._all()
        if self._wanted_step is not None:
            place = self._folder.checkpoints / f"step-{self._wanted_step:06d}"
            if place not in every:
                raise InputError(
                    f"no checkpoint of step {self._wanted_step}; there are: "
                    f"{', '.join(str(int(path.name.removeprefix('step-'))) for path in every) or 'none'}"
                )
            complaint = find_damage(place)
            if complaint:
                raise CheckpointError(f"{place} is damaged: {complaint}")
            return place
        for place in reversed(every):
            complaint = find_damage(place)
            if complaint is None:
                return place
            self._warn(f"warning: {place} is damaged ({complaint}); going back to the one before it")
            self._folder.event("damaged_checkpoint", checkpoint=place.name, complaint=complaint)
        if every:
            raise CheckpointError(
                f"every checkpoint in {self._folder.checkpoints} is damaged; the run is not started over"
            )
        if self._folder.has_event("committed"):
            raise CheckpointError(
                f"the checkpoints of {self._folder.path} are gone, and it had some; the run is not started over"
            )
        return None

    def _set_aside(self, newer_than: int) -> None:
        """Checkpoints after the one that was restored would stand in the way of the new ones; none is deleted."""
        for place in self._all():
            if int(place.name.removeprefix("step-")) > newer_than:
                place.rename(place.with_name(f"aside-{place.name}-{time.time_ns()}"))

    def _all(self) -> list[Path]:
        """By step. A folder that cannot be read is an error, never "no checkpoints"."""
        if not self._folder.checkpoints.exists():
            return []
        try:
            names = [entry.name for entry in os.scandir(self._folder.checkpoints)]
        except OSError as error:
            raise CheckpointError(f"{self._folder.checkpoints} cannot be read: {error.strerror}") from None
        steps = sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d+", name))
        return [self._folder.checkpoints / f"step-{step:06d}" for step in steps]


def describe_file(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def find_damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_text())
        if set(files) != FILES:
            return f"{MANIFEST} does not list the files that a checkpoint has"
        for name, expected in files.items():
            if describe_file(checkpoint / name) != expected:
                return f"{name} is not what was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, AttributeError, TypeError):
        return f"{MANIFEST} cannot be read"
    return None


def flush(path: Path) -> None:
    """Until this returns, a power cut may lose the file or the folder's entries."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
