"""Stage 9: the atomic commit, and how a run is restored from it.

In: the state at the end of a window. Out: a checkpoint (`checkpoint_files.py`) with all that the run needs to continue
bit for bit. Training only waits for a copy of the tensors. Another thread writes the copy, verifies it and deletes old
checkpoints, one commit at a time; its errors are raised at the next commit. The newest checkpoint follows from the
folder names and is not stored anywhere.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError

from podium.errors import CheckpointError, InputError
from podium.records import RunState
from podium.run.checkpoint_files import (
    find_damage,
    find_difference,
    flush,
    list_checkpoints,
    read_settings,
    read_state,
    read_tensors,
    step_of,
    write_checkpoint,
)
from podium.run.folder import RunFolder
from podium.run.ledger import Ledger

if TYPE_CHECKING:
    import torch


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Hooks:
    """Functions that a runtime may have called during the life of a checkpoint."""

    begin: Callable[[], None] = _nothing
    """Called when a run starts at step 0: may give the trainer other weights to start from."""
    accept: Callable[[str, int], None] = _nothing
    """Gets the settings and the step of the restored checkpoint; raises `InputError` if the run may not continue from
    them."""
    restored: Callable[[RunState, Path | None], None] = _nothing
    """Gets the initial state and its checkpoint, or None at step 0; called in its own thread."""
    committed: Callable[[Path, int], None] = _nothing
    """Gets each new checkpoint and its step, in the thread that wrote it."""
    warn: Callable[[str], None] = print
    """Gets a message about a damaged checkpoint, or about a resumed run that has no checkpoint."""


class SavedTrainer(Protocol):
    """What a checkpoint needs of a trainer."""

    def state(self) -> Mapping[str, torch.Tensor]: ...

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None: ...

    def save_model(self, folder: str) -> None: ...


class FolderCheckpoint:
    """`settings` is the text of the run's settings, which every checkpoint stores."""

    def __init__(
        self,
        folder: RunFolder,
        trainer: SavedTrainer,
        ledger: Ledger,
        data_fingerprint: str,
        settings: str,
        *,
        every: int,
        keep: int,
        step: int | None = None,
        base_digest: str | None = None,
        hooks: Hooks = Hooks(),  # noqa: B008  frozen
    ) -> None:
        """`step` names the checkpoint to restore; default: the newest undamaged one. `base_digest` is the digest of the
        weights under an adapter."""
        self._folder, self._trainer, self._ledger = folder, trainer, ledger
        self._data_fingerprint, self._settings, self._base_digest = data_fingerprint, settings, base_digest
        self._every, self._keep, self._wanted_step, self._hooks = every, keep, step, hooks
        self._last_begun: int | None = None
        """Step of the last commit that was started; its error is raised before the next commit starts."""
        self._writing: asyncio.Task[None] | None = None
        self._restarts = 0
        self._whole = RunState()
        """The state at the end of the last window, which matches the trainer's weights unless it has trained since."""

    async def restore_or_start(self) -> RunState:
        state, chosen = self._restore()
        await asyncio.to_thread(self._hooks.restored, state, chosen)
        return state

    def _restore(self) -> tuple[RunState, Path | None]:
        self._folder.clean_up()
        chosen = self._choose()
        self._restarts = self._folder.restarts
        if chosen is None:
            if self._restarts:
                self._hooks.warn(f"{self._folder.path} has no checkpoint yet: the run starts again at step 0")
            self._hooks.begin()
            self._ledger.rewind(None)
            return RunState(), None
        saved = read_state(chosen)
        if saved["data_fingerprint"] != self._data_fingerprint:
            raise InputError("the data is not what this run was trained on; restore it, or start a new run")
        settings = read_settings(chosen)
        if settings is not None:
            self._hooks.accept(settings, saved["state"]["step"])
            self._check_base(saved.get("base_digest"), settings)
        self._trainer.load_state(read_tensors(chosen))
        listed = {key: tuple(saved["state"].get(key, ())) for key in ("retired", "pending")}
        state = RunState(**saved["state"] | listed)
        self._ledger.check(saved["ledger"])
        self._set_aside(state.step)  # before the ledger is truncated: after a kill in between, this one is the newest
        self._ledger.rewind(saved["ledger"])
        self._restarts = max(self._restarts, saved["restarts"] + 1)
        self._last_begun, self._whole = state.step, state
        self._folder.event("restored", step=state.step, checkpoint=chosen.name, restarts=self._restarts)
        return state, chosen

    def _check_base(self, saved: str | None, settings: str) -> None:
        """Raises `InputError` unless the base weights are those that the adapter was trained on.

        Checkpoints of full weights, and older ones, have no digest. The check is skipped if the user insisted on
        another model or precision.
        """
        before, now = (tomllib.loads(text).get("model", {}) for text in (settings, self._settings))
        is_insisted = any(before.get(key) != now.get(key) for key in ("name", "dtype", "lora"))
        if saved and self._base_digest and saved != self._base_digest and not is_insisted:
            raise InputError(
                f"model.name = {now.get('name')!r}: the base weights are not those that this run's adapter was trained "
                "on: the folder has changed, or the name now means another revision; restore them, or start a new run"
            )

    async def commit_if_due(self, state: RunState) -> None:
        """Due once `every` steps have passed since the last commit; a window may move past the exact multiple."""
        self._whole = state
        if self._every and state.step // self._every > (self._last_begun or 0) // self._every:
            await self._begin(state)

    async def commit(self, state: RunState) -> None:
        """Returns once the checkpoint is on disk."""
        self._whole = state
        await self._begin(state)
        await self._settled()

    async def commit_last(self) -> RunState:
        """Commits the end of the last window, for a run that stops in a window before training on any of it."""
        await self.commit(self._whole)
        return self._whole

    async def finish(self, state: RunState) -> None:
        await self.commit(state)
        unfinished = self._folder.path / f"final.tmp-{os.getpid()}"
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            await asyncio.to_thread(self._trainer.save_model, str(unfinished))
            for path in (*unfinished.iterdir(), unfinished):
                flush(path)
            if self._folder.final.exists():
                shutil.rmtree(self._folder.final)
            unfinished.rename(self._folder.final)
        except (OSError, SafetensorError) as error:
            self._folder.clean_up()
            raise CheckpointError(
                f"the trained model cannot be written: {error}; the last checkpoint holds it: free space and resume"
            ) from None
        flush(self._folder.path)

    def place_of(self, step: int) -> Path:
        return self._folder.checkpoints / f"step-{step:06d}"

    async def _begin(self, state: RunState) -> None:
        """Copies what a commit needs and starts writing it during training; a run at step 0 has nothing to commit.

        Commits never overlap: this waits for the previous one and raises its error.
        """
        await self._settled()
        if self._last_begun == state.step or state.step == 0:
            return
        self._folder.event("committing", step=state.step)
        saved = {
            "state": asdict(state),
            "data_fingerprint": self._data_fingerprint,
            "base_digest": self._base_digest,
            "ledger": self._ledger.position(),
            "restarts": self._restarts,
        }
        ledger_files = self._ledger.unflushed()
        tensors = await asyncio.to_thread(self._trainer.state)
        self._last_begun = state.step
        self._writing = asyncio.create_task(asyncio.to_thread(self._write, state.step, tensors, saved, ledger_files))
        self._writing.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio prints it

    async def _settled(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    def _write(self, step: int, tensors: Mapping[str, Any], saved: Mapping[str, Any], ledger_files: list[Path]) -> None:
        started = time.monotonic()
        place = self.place_of(step)
        _refuse_not_finite(tensors, step)
        try:
            size = write_checkpoint(place, tensors, saved, self._settings, ledger_files)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written: {error}; earlier checkpoints are untouched: "
                "free disk space or fix the disk, and resume"
            ) from None
        written = time.monotonic()
        complaint = find_difference(place, tensors)
        if complaint:
            raise CheckpointError(f"{place} was just written and is damaged: {complaint}; check the disk")
        seconds = {"seconds": written - started, "verify_s": time.monotonic() - written}
        self._folder.event("committed", step=step, bytes=size, **seconds)
        self._folder.note_progress()
        self._retire()
        self._hooks.committed(place, step)

    def _retire(self) -> None:
        """Deletes the oldest checkpoints; the newest has just been read back."""
        for path in list_checkpoints(self._folder.checkpoints)[: -self._keep]:
            doomed = path.with_name(f"{path.name}.tmp-{os.getpid()}")
            path.rename(doomed)  # so that a half-deleted folder is a leftover and not a damaged checkpoint
            shutil.rmtree(doomed)

    def _choose(self) -> Path | None:
        """The checkpoint to continue from; None only if there has never been one."""
        every = list_checkpoints(self._folder.checkpoints)
        if self._wanted_step is not None:
            place = self.place_of(self._wanted_step)
            if place not in every:
                raise InputError(
                    f"no checkpoint of step {self._wanted_step}; there are: "
                    f"{', '.join(str(step_of(path)) for path in every) or 'none'}"
                )
            complaint = find_damage(place)
            if complaint:
                raise CheckpointError(f"{place} is damaged: {complaint}")
            return place
        for place in reversed(every):
            complaint = find_damage(place)
            if complaint is None:
                return place
            self._hooks.warn(f"warning: {place} is damaged ({complaint}); going back to the one before it")
            self._folder.event("damaged_checkpoint", checkpoint=place.name, complaint=complaint)
        if every:
            raise CheckpointError(
                f"every checkpoint in {self._folder.checkpoints} is damaged; the run does not start over"
            )
        if self._folder.has_event("committed"):
            raise CheckpointError(
                f"the checkpoints of {self._folder.path} have been deleted; the run does not start over"
            )
        return None

    def _set_aside(self, newer_than: int) -> None:
        """Renames checkpoints after the restored one, which would collide with the new ones; none is deleted."""
        for place in list_checkpoints(self._folder.checkpoints):
            if step_of(place) > newer_than:
                place.rename(place.with_name(f"aside-{place.name}-{time.time_ns()}"))


def newest_checkpoint(path: Path) -> Path:
    """A checkpoint's folder, or the newest undamaged checkpoint of a run's folder; to read another run's weights."""
    if (path / "manifest.json").is_file():
        complaint = find_damage(path)
        if complaint:
            raise CheckpointError(f"{path} is damaged: {complaint}")
        return path
    for place in reversed(list_checkpoints(path / "checkpoints")):
        if find_damage(place) is None:
            return place
    raise InputError(f"{str(path)!r} is neither a checkpoint nor a run folder with an undamaged one")


def _refuse_not_finite(tensors: Mapping[str, Any], step: int) -> None:
    """Rejects a commit of broken weights, which would replace a good one."""
    for name, tensor in tensors.items():
        if name.startswith("weights.") and not bool(tensor.isfinite().all()):
            raise CheckpointError(
                f"{name.removeprefix('weights.')} holds values that are not finite numbers at step {step}; nothing was "
                "saved. Resume from the checkpoint before it, with a lower trainer.lr"
            )
