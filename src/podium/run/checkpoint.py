"""Stage 9: the atomic commit, how a checkpoint lies on the disk, and how a run is restored from it.

A checkpoint is a folder with weights, optimizer and random states (`trainer.safetensors`), the state of the run and the
length of its ledger (`state.json`), its settings (`settings.toml`), and the length and sha256 of each file
(`manifest.json`). It is written under a temporary name, flushed to disk and renamed, so it is complete or absent. It
holds tensors and JSON only: nothing in it can be executed. The newest checkpoint follows from the folder names.

Training only waits for a copy of the tensors. Another thread writes the copy, verifies it and deletes old checkpoints,
one commit at a time; its errors are raised at the next commit.
"""

import asyncio
import ctypes
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from podium.errors import CheckpointError, InputError
from podium.records import RunState
from podium.run.folder import Ledger, RunFolder
from podium.stages import SavedTrainer
from podium.untrusted import open_regular, read_regular, warn

FORMAT = 2
"""2 added the settings and the number of restarts; 1 had neither."""
MANIFEST, STATE, TENSORS, SETTINGS = "manifest.json", "state.json", "trainer.safetensors", "settings.toml"
COMMAND_S = 600.0
"""Seconds that `checkpoint.on_checkpoint` may take."""
GUARDED = """
exec 3<&0
/bin/sh -c "$1" </dev/null 3<&- &
command=$!
(read -r line <&3; kill -KILL 0) &
guard=$!
wait $command
code=$?
kill -KILL $guard
exit $code
"""
"""A shell that runs a command while a second shell waits for the end of its input, then kills the process group."""
_memcmp = ctypes.CDLL(None).memcmp  # more than twice as fast as torch.equal, and a NaN equals itself
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _nothing(*_: Any) -> None:
    pass


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
        begin: Callable[[], None] = _nothing,
        accept: Callable[[str, int], None] = _nothing,
        restored: Callable[[RunState, Path | None], None] = _nothing,
        store: Callable[[Path], None] | None = None,
        command: str | None = None,
    ) -> None:
        """`step` names the checkpoint to restore; default: the newest undamaged one. `base_digest` is the digest of the
        weights under an adapter.

        `begin` is called when a run starts at step 0, and may give the trainer other weights. `accept` gets the
        settings and the step of the restored checkpoint, and raises `InputError` if the run may not continue from them.
        `restored` gets the initial state and its checkpoint, or None at step 0, in a thread of its own. Each new
        checkpoint is given to `store`, which copies it to another place, and to the user's shell `command`, both in
        the thread that wrote it.
        """
        self._folder, self._trainer, self._ledger = folder, trainer, ledger
        self._data_fingerprint, self._settings, self._base_digest = data_fingerprint, settings, base_digest
        self._every, self._keep, self._wanted_step = every, keep, step
        self._begin_new, self._accept, self._restored = begin, accept, restored
        self._store, self._command = store, command
        self._last_begun: int | None = None
        """Step of the last commit that was started; its error is raised before the next commit starts."""
        self._writing: asyncio.Task[None] | None = None
        self._restarts = 0
        self._whole = RunState()
        """The state at the end of the last window, which matches the trainer's weights unless it has trained since."""

    async def restore_or_start(self) -> RunState:
        state, chosen = self._restore()
        await asyncio.to_thread(self._restored, state, chosen)
        return state

    def _restore(self) -> tuple[RunState, Path | None]:
        self._folder.clean_up()
        chosen = self._choose()
        self._restarts = self._folder.restarts
        if chosen is None:
            if self._restarts:
                warn(f"{self._folder.path} has no checkpoint yet: the run starts again at step 0")
            self._begin_new()
            self._ledger.rewind(None)
            return RunState(), None
        saved = read_state(chosen)
        if saved["data_fingerprint"] != self._data_fingerprint:
            raise InputError("the data is not what this run was trained on; restore it, or start a new run")
        settings = read_settings(chosen)
        if settings is not None:
            self._accept(settings, saved["state"]["step"])
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

    def _choose(self) -> Path | None:
        """The checkpoint to continue from; None only if there has never been one."""
        every = list_checkpoints(self._folder.checkpoints)
        if self._wanted_step is not None:
            place = self._place_of(self._wanted_step)
            if place not in every:
                raise InputError(
                    f"no checkpoint of step {self._wanted_step}; there are: "
                    f"{', '.join(str(step_of(path)) for path in every) or 'none'}"
                )
            return _undamaged(place)
        for place in reversed(every):
            complaint = find_damage(place)
            if complaint is None:
                return place
            warn(f"warning: {place} is damaged ({complaint}); going back to the one before it")
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

    def _set_aside(self, newer_than: int) -> None:
        """Renames checkpoints after the restored one, which would collide with the new ones; none is deleted."""
        for place in list_checkpoints(self._folder.checkpoints):
            if step_of(place) > newer_than:
                place.rename(place.with_name(f"aside-{place.name}-{time.time_ns()}"))

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
                _flush(path)
            if self._folder.final.exists():
                shutil.rmtree(self._folder.final)
            unfinished.rename(self._folder.final)
        except (OSError, SafetensorError) as error:
            self._folder.clean_up()
            raise CheckpointError(
                f"the trained model cannot be written: {error}; the last checkpoint holds it: free space and resume"
            ) from None
        _flush(self._folder.path)

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
        place = self._place_of(step)
        for name, tensor in tensors.items():  # broken weights must not replace good ones
            if name.startswith("weights.") and not bool(tensor.isfinite().all()):
                raise CheckpointError(
                    f"{name.removeprefix('weights.')} holds values that are not finite numbers at step {step}; nothing "
                    "was saved. Resume from the checkpoint before it, with a lower trainer.lr"
                )
        try:
            size = write_checkpoint(place, tensors, saved, self._settings, ledger_files)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written: {error}; earlier checkpoints are untouched: "
                "free disk space or fix the disk, and resume"
            ) from None
        written = time.monotonic()
        if complaint := find_difference(place, tensors):
            raise CheckpointError(f"{place} was just written and is damaged: {complaint}; check the disk")
        seconds = {"seconds": written - started, "verify_s": time.monotonic() - written}
        self._folder.event("committed", step=step, bytes=size, **seconds)
        self._folder.note_progress()
        for old in list_checkpoints(self._folder.checkpoints)[: -self._keep]:  # the newest has just been read back
            doomed = old.with_name(f"{old.name}.tmp-{os.getpid()}")
            old.rename(doomed)  # so that a half-deleted folder is a leftover and not a damaged checkpoint
            shutil.rmtree(doomed)
        if self._store is not None:
            self._store(place)
        if self._command is not None:
            self._run(self._command, place, step)

    def _run(self, command: str, place: Path, step: int) -> None:
        """A command that fails cannot stop the run: there is a warning and an event."""
        environment = {"PODIUM_RUN": str(self._folder.path), "PODIUM_CHECKPOINT": str(place), "PODIUM_STEP": str(step)}
        with subprocess.Popen(
            ["/bin/sh", "-c", GUARDED, "sh", command],
            env=os.environ | environment,
            stdin=subprocess.PIPE,  # never written to: it ends when this process does, however that ends
            start_new_session=True,
        ) as process:
            try:
                code = process.wait(timeout=COMMAND_S)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                code = None
        self._folder.event("on_checkpoint", step=step, exit_code=code)
        if code != 0:
            ended = f"ended with {code}" if code is not None else f"took over {COMMAND_S:g} s and was killed"
            warn(f"warning: checkpoint.on_checkpoint {ended} after step {step}; the run goes on")

    def _place_of(self, step: int) -> Path:
        return self._folder.checkpoints / f"step-{step:06d}"


def write_checkpoint(
    place: Path, tensors: Mapping[str, Any], saved: Mapping[str, Any], settings: str, others: Iterable[Path]
) -> int:
    """Writes a checkpoint and returns its size in bytes. `others` are files that it depends on; they are flushed first.

    The order protects against a power cut: first every file, then the folder that lists them, then the new name.
    """
    unfinished = place.with_name(f"{place.name}.tmp-{os.getpid()}")
    try:
        place.parent.mkdir(exist_ok=True)  # not its parents: a deleted run folder must not come back
        unfinished.mkdir()
        save_file(dict(tensors), unfinished / TENSORS)
        (unfinished / STATE).write_text(json.dumps({"format": FORMAT, **saved}))
        (unfinished / SETTINGS).write_text(settings)
        described = {name: describe_file(unfinished / name) for name in (SETTINGS, STATE, TENSORS)}
        (unfinished / MANIFEST).write_text(_manifest_text(described))
        for path in (*sorted(unfinished.iterdir()), unfinished, *others):
            _flush(path)
        unfinished.rename(place)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    _flush(place.parent)
    _flush(place.parent.parent)  # the first time, `checkpoints/` itself is new
    return sum(file["bytes"] for file in described.values())


def find_damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None. A file that exists but cannot be read is an error, not damage."""
    try:
        text = read_regular(checkpoint / MANIFEST).decode()
        files = json.loads(text)
        if not {STATE, TENSORS} <= set(files) or text != _manifest_text(files):
            return f"{MANIFEST} does not list the files that a checkpoint has"
        for name, expected in files.items():
            if describe_file(checkpoint / name) != expected:
                return f"{name} is not what was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint} cannot be read: {error.strerror}; fix the disk or the permissions"
        ) from None
    except (ValueError, AttributeError, TypeError):
        return f"{MANIFEST} cannot be read"
    return None


def _undamaged(checkpoint: Path) -> Path:
    if complaint := find_damage(checkpoint):
        raise CheckpointError(f"{checkpoint} is damaged: {complaint}")
    return checkpoint


def find_difference(checkpoint: Path, tensors: Mapping[str, Any]) -> str | None:
    """How a checkpoint on disk differs from these tensors, or None.

    For a checkpoint just written, while the tensors are still in memory: comparing is much faster than hashing again.
    """
    files = json.loads(read_regular(checkpoint / MANIFEST))
    for name in (STATE, SETTINGS):
        if describe_file(checkpoint / name) != files[name]:
            return f"{name} is not what was written"
    if (checkpoint / TENSORS).stat().st_size != files[TENSORS]["bytes"]:
        return f"{TENSORS} is not as long as it was written"
    with open_regular(checkpoint / TENSORS) as file, mmap(file.fileno(), 0, access=ACCESS_COPY) as mapped:
        return _other_tensors(mapped, tensors)


def _other_tensors(mapped: mmap, tensors: Mapping[str, Any]) -> str | None:
    """Parses the safetensors file itself, because `load_file` of safetensors 0.8 leaks memory with each tensor.

    The file is the length of its header, the header as JSON, and each tensor's bytes between the given offsets.
    """
    start = 8 + int.from_bytes(mapped[:8], "little")
    header = json.loads(mapped[8:start])
    if {*header} - {"__metadata__"} != {*tensors}:
        return f"{TENSORS} holds other tensors than were written"
    on_disk = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr() + start
    for name, tensor in tensors.items():
        meant = tensor.cpu().contiguous()
        first, last = header[name]["data_offsets"]
        if header[name]["shape"] != list(tensor.shape) or last - first != tensor.nbytes:
            return f"{name} in {TENSORS} has another shape than was written"
        is_inside = 0 <= first <= last <= len(mapped) - start
        if not is_inside or _memcmp(on_disk + first, meant.data_ptr(), meant.nbytes):
            return f"{name} in {TENSORS} is not what was written"
    return None


def newest_checkpoint(path: Path) -> Path:
    """A checkpoint's folder, or the newest undamaged checkpoint of a run's folder; to read another run's weights."""
    if (path / MANIFEST).is_file():
        return _undamaged(path)
    for place in reversed(list_checkpoints(path / "checkpoints")):
        if find_damage(place) is None:
            return place
    raise InputError(f"{str(path)!r} is neither a checkpoint nor a run folder with an undamaged one")


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints by step. A folder that cannot be read is an error, never "no checkpoints"."""
    if not folder.exists():
        return []
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from None
    steps = sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d+", name))
    return [folder / f"step-{step:06d}" for step in steps]


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The contents of `state.json`, in the current format."""
    saved = json.loads(read_regular(checkpoint / STATE))
    if not 1 <= saved["format"] <= FORMAT:
        raise CheckpointError(
            f"{checkpoint} has format {saved['format']}; this version of Podium reads formats 1 to {FORMAT}: "
            "use the version that wrote it, or a newer one"
        )
    return {"restarts": 0, **saved}


def read_settings(checkpoint: Path) -> str | None:
    """The text of the settings it was written with; None in format 1, which has no settings."""
    path = checkpoint / SETTINGS
    return read_regular(path).decode() if path.exists() else None


def read_tensors(checkpoint: Path) -> dict[str, Any]:
    try:
        with open_regular(checkpoint / TENSORS) as file:
            return load_file(f"/proc/self/fd/{file.fileno()}")  # safetensors opens by name
    except SafetensorError as error:
        raise CheckpointError(f"{checkpoint}: {TENSORS} holds no tensors: {error}") from None


def describe_file(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _manifest_text(files: Mapping[str, Any]) -> str:
    """One canonical form, so that every changed byte is found."""
    return json.dumps(files, indent=1)


def _flush(path: Path) -> None:
    """Flushes a file, or a folder's entries, to disk; until it returns, a power cut may lose them."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
