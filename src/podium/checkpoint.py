"""Stage 9: the one atomic commit, and the way back.

In: the state at the end of a window. Out: a checkpoint (`checkpoint_files.py`) that holds all that the run needs to go
on with the same bits. The training thread only waits for a copy of the tensors; the copy is written, proven and old
ones are deleted in another thread, one commit at a time. What goes wrong there is raised at the next commit. The newest
checkpoint is computed from the names, never stored.
"""

import asyncio
import os
import shutil
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from podium.checkpoint_files import (
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
from podium.errors import CheckpointError, InputError
from podium.ledger import Ledger
from podium.records import RunState
from podium.run_folder import RunFolder
from podium.stages import Trainer


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Hooks:
    """What a runtime may want to do at the turns of a checkpoint's life."""

    begin: Callable[[], None] = _nothing
    """Called where a run starts at step 0: gives the trainer other weights to start from."""
    accept: Callable[[str, int], None] = _nothing
    """Given the settings and the step of the checkpoint that is restored; raises `InputError` if the run may not go on
    from them."""
    committed: Callable[[Path, int], None] = _nothing
    """Given each new checkpoint and its step, in the thread that wrote it."""
    warn: Callable[[str], None] = print
    """Told of a checkpoint that is damaged, and of a run that is taken up without having one."""


class FolderCheckpoint:
    """`settings` is the text of the run's settings, which every checkpoint keeps."""

    def __init__(
        self,
        folder: RunFolder,
        trainer: Trainer,
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
        """`step` names the checkpoint to restore; by default the newest that can be trusted. `base_digest` is that of
        the weights under an adapter."""
        self._folder, self._trainer, self._ledger = folder, trainer, ledger
        self._data_fingerprint, self._settings, self._base_digest = data_fingerprint, settings, base_digest
        self._every, self._keep, self._wanted_step, self._hooks = every, keep, step, hooks
        self._last_begun: int | None = None
        """Step of the last commit that was begun; an error in it is raised before another is."""
        self._writing: asyncio.Task[None] | None = None
        self._restarts = 0
        self._whole = RunState()
        """At the end of the last window: what the trainer's weights are of, unless it has trained since."""

    async def restore_or_start(self) -> RunState:
        self._folder.clean_up()
        chosen = self._choose()
        self._restarts = self._folder.restarts
        if chosen is None:
            if self._restarts:
                self._hooks.warn(f"{self._folder.path} has no checkpoint yet: it begins again at step 0")
            self._hooks.begin()
            self._ledger.rewind(None)
            return RunState()
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
        self._set_aside(state.step)  # before the ledger is cut: killed in between, this one is still the newest
        self._ledger.rewind(saved["ledger"])
        self._restarts = max(self._restarts, saved["restarts"] + 1)
        self._last_begun, self._whole = state.step, state
        self._folder.event("restored", step=state.step, checkpoint=chosen.name, restarts=self._restarts)
        return state

    def _check_base(self, saved: str | None, settings: str) -> None:
        """An adapter fits the base weights that it was trained on. Checkpoints of full weights, and those from before
        the digest was kept, have none. Where the user insisted on another model or precision, it is another one."""
        before, now = (tomllib.loads(text).get("model", {}) for text in (settings, self._settings))
        is_insisted = any(before.get(key) != now.get(key) for key in ("name", "dtype", "lora"))
        if saved and self._base_digest and saved != self._base_digest and not is_insisted:
            raise InputError(
                f"model.name = {now.get('name')!r}: the base weights are not those that this run's adapter was trained "
                "on: the folder was changed, or the name stands for another revision now; restore them, or start a new "
                "run"
            )

    async def commit_if_due(self, state: RunState) -> None:
        """Due once `every` steps have passed since the last commit; a window may carry it past the exact multiple."""
        self._whole = state
        if self._every and state.step // self._every > (self._last_begun or 0) // self._every:
            await self._begin(state)

    async def commit(self, state: RunState) -> None:
        """Returns once it is on disk."""
        self._whole = state
        await self._begin(state)
        await self._settled()

    async def commit_last(self) -> RunState:
        """Commits the end of the last window, for a run that breaks off a window before anything of it was trained."""
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
                f"the trained model cannot be written: {error}; the last checkpoint holds it: make room and resume"
            ) from None
        flush(self._folder.path)

    def place_of(self, step: int) -> Path:
        return self._folder.checkpoints / f"step-{step:06d}"

    async def _begin(self, state: RunState) -> None:
        """Copies what a commit needs and lets it be written beside the training; a run at step 0 has nothing to keep.

        Two commits never overlap: the one before is waited for, and its error raised.
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
        self._writing.add_done_callback(lambda done: done.cancelled() or done.exception())  # else it prints itself

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
                f"the checkpoint of step {step} cannot be written: {error}; the ones before it are untouched: "
                "make room or mend the disk, and resume"
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
            path.rename(doomed)  # half deleted, it is a leftover and no damaged checkpoint
            shutil.rmtree(doomed)

    def _choose(self) -> Path | None:
        """The checkpoint to go on from; None only if there has never been one."""
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
                f"every checkpoint in {self._folder.checkpoints} is damaged; the run is not started over"
            )
        if self._folder.has_event("committed"):
            raise CheckpointError(
                f"the checkpoints of {self._folder.path} are gone, and it had some; the run is not started over"
            )
        return None

    def _set_aside(self, newer_than: int) -> None:
        """Checkpoints after the one that was restored would stand in the way of the new ones; none is deleted."""
        for place in list_checkpoints(self._folder.checkpoints):
            if step_of(place) > newer_than:
                place.rename(place.with_name(f"aside-{place.name}-{time.time_ns()}"))


def newest_checkpoint(path: Path) -> Path:
    """A checkpoint's folder, or the newest good one of a run's folder; for what reads another run's weights."""
    if (path / "manifest.json").is_file():
        complaint = find_damage(path)
        if complaint:
            raise CheckpointError(f"{path} is damaged: {complaint}")
        return path
    for place in reversed(list_checkpoints(path / "checkpoints")):
        if find_damage(place) is None:
            return place
    raise InputError(f"{str(path)!r} is neither a checkpoint nor a run folder that has a good one")


def _refuse_not_finite(tensors: Mapping[str, Any], step: int) -> None:
    """A commit of broken weights would take the place of a good one."""
    for name, tensor in tensors.items():
        if name.startswith("weights.") and not bool(tensor.isfinite().all()):
            raise CheckpointError(
                f"{name.removeprefix('weights.')} holds values that are no finite numbers at step {step}; nothing was "
                "saved. Resume from the checkpoint before it, with a lower trainer.lr"
            )
