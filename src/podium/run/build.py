"""From `[checkpoint]` to the checkpoint stage.

In: the settings, the run folder and the trainer. Out: `FolderCheckpoint`. Here are also the weights that a run starts
from, the room that checkpoints need on the disk, the settings that a resume may change, and `on_checkpoint`.
"""

import json
import os
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from podium.errors import CheckpointError, InputError, WeightsError
from podium.model.handoff import PEFT_PREFIX, PEFT_SUFFIX, check_weights
from podium.model.load import Policy
from podium.records import RunState
from podium.run.checkpoint import FolderCheckpoint, Hooks, SavedTrainer, newest_checkpoint
from podium.run.checkpoint_files import list_checkpoints, read_tensors, step_of
from podium.run.folder import RunFolder
from podium.run.ledger import Ledger
from podium.run.resume_rules import changes, check_changes
from podium.settings.removed import of_first_version
from podium.settings.tables import Settings
from podium.terminal import warn

OTHER_SCALES = ("use_rslora", "rank_pattern", "alpha_pattern")
"""Keys of an adapter_config.json that scale an adapter otherwise than by alpha / r."""
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


class StateBytes(Protocol):
    """Sizes of what a checkpoint holds, as the memory plan has them."""

    @property
    def trained(self) -> int: ...

    @property
    def optimizer(self) -> int: ...

    @property
    def reference(self) -> int: ...


def build_checkpoint(
    settings: Settings,
    folder: RunFolder,
    trainer: SavedTrainer,
    ledger: Ledger,
    data_fingerprint: str,
    step: int | None,
    base_digest: str | None,
    begin: Callable[[], None],
    store: Callable[[Path], None] = lambda place: None,
    restored: Callable[[RunState, Path | None], None] = lambda state, place: None,
) -> FolderCheckpoint:
    """`step` names the checkpoint to go on from; `begin` gives the trainer the weights that a new run starts from;
    `base_digest` is that of the weights under the adapter. `store` copies a new checkpoint to another place; `restored`
    is called with the state that the run begins with and its checkpoint."""
    if settings.run.sync_every == 0:
        begin()  # the engine is given these weights before a checkpoint is restored
    command = settings.checkpoint.on_checkpoint

    def accept(text: str, step: int) -> None:
        _accept_settings(Settings.from_dict(of_first_version(tomllib.loads(text))), settings, folder, step)

    def committed(place: Path, step: int) -> None:
        store(place)
        if command is not None:
            _run_command(command, folder, place, step)

    return FolderCheckpoint(
        folder,
        trainer,
        ledger,
        data_fingerprint,
        settings.to_toml(),
        every=settings.checkpoint.every,
        keep=settings.checkpoint.keep,
        step=step,
        base_digest=base_digest,
        hooks=Hooks(begin=begin, accept=accept, restored=restored, committed=committed, warn=warn),
    )


def _accept_settings(before: Settings, after: Settings, folder: RunFolder, step: int) -> None:
    """Compares the settings of the checkpoint with those of this resume, so an edited settings.toml is noticed too.

    The value that was accepted last stays accepted: a run that was killed before its first checkpoint with that value
    goes on. Any other value is checked again.
    """
    accepted: dict[str, Any] = {}
    for event in folder.events_of("changed"):
        accepted |= event.get("values", {})
    for warning in check_changes(before, after, folder.allowed_changes, step, accepted):
        warn(warning)
    found = {key: new for key, (_, new) in changes(before, after).items()}
    if new := {key: value for key, value in found.items() if key not in accepted or accepted[key] != value}:
        folder.event("changed", keys=list(new), values=new)


def check_start(settings: Settings) -> None:
    """Checks that the weights that a run starts from exist, before a model is loaded."""
    if (place := settings.checkpoint.start_from) is None:
        return
    if not _is_adapter(place):
        _named(place, newest_checkpoint)
    elif settings.model.lora is False:
        raise InputError(
            f"checkpoint.start_from = {str(place)!r} is a LoRA folder, and model.lora = false trains no adapter; set a "
            "[model.lora] table or give a checkpoint"
        )
    else:
        _named(place, _adapter_config)


def load_start(settings: Settings, policy: Policy, trainer: Any) -> None:
    """Loads the weights of `start_from` into the trainer; its optimizer and counters stay new.

    With several ranks, their weights are compared, whatever they start from.
    """
    if hasattr(trainer, "check_same"):
        trainer.check_same("after the model was loaded")
    if (given := settings.checkpoint.start_from) is None:
        return
    if _is_adapter(given):
        _named(given, lambda folder: trainer.load_weights(_adapter_weights(policy, folder)))
    else:
        _named(given, lambda place: trainer.load_weights(read_tensors(newest_checkpoint(place))))


def _is_adapter(place: Path) -> bool:
    """Whether it is a LoRA folder, and not a checkpoint or a run."""
    return (place.expanduser() / "adapter_config.json").is_file()


def _named(path: Path, read: Callable[[Path], Any]) -> Any:
    """Problems with a folder that the user gave become an `InputError` that names the setting."""
    try:
        return read(path.expanduser())
    except (OSError, ValueError, CheckpointError, WeightsError, SafetensorError) as error:
        raise InputError(f"checkpoint.start_from = {str(path)!r}: {error}") from None


def _adapter_config(folder: Path) -> dict[str, Any]:
    if not (folder / "adapter_config.json").is_file() or not (folder / "adapter_model.safetensors").is_file():
        raise InputError("no LoRA folder: it needs adapter_config.json and adapter_model.safetensors")
    return json.loads((folder / "adapter_config.json").read_text())


def _adapter_weights(policy: Policy, folder: Path) -> dict[str, torch.Tensor]:
    """The adapter of a LoRA folder, by the names of a checkpoint, which the trainer of every rank takes.

    Only tensors are read; the adapter's shape and scale must agree with the settings.
    """
    given, mine = _adapter_config(folder), policy.peft.peft_config["default"]
    for key, name in (("r", "r"), ("lora_alpha", "alpha")):
        if given.get(key) != getattr(mine, key):
            raise InputError(f"it has {key} = {given.get(key)}; set model.lora.{name} to that")
    for key in OTHER_SCALES:
        if given.get(key):
            raise InputError(f"it has {key} = {given[key]!r}, and this run scales every layer by alpha / r")
    found = load_file(folder / "adapter_model.safetensors")
    found = {name.removeprefix(PEFT_PREFIX).removesuffix(PEFT_SUFFIX): tensor for name, tensor in found.items()}
    own = dict(policy.named_trained())
    # Names and numbers. The trainer knows the shapes: where weights are spread over ranks, a parameter here does not.
    check_weights(found, {name: found.get(name, parameter) for name, parameter in own.items()}, folder.name)
    names = {id(parameter): name for name, parameter in policy.trained_parameters().items()}
    return {f"weights.{names[id(parameter)]}": found[name] for name, parameter in own.items()}


def check_space(settings: Settings, folder: RunFolder, memory: StateBytes, step: int | None = None) -> None:
    """Checks that the disk has room for the kept checkpoints, one more being written, and the trained model.

    A run with fewer commits needs room for fewer. A resumed run replaces the checkpoints that it finds, except those
    after the `step` that it begins from.
    """
    keep, every = settings.checkpoint.keep, settings.checkpoint.every
    commits = -(-settings.run.steps // every) if every else 1
    at_once = min(keep + 1, commits)
    moving = memory.reference if settings.model.reference not in (None, "initial") else 0
    each = memory.trained + memory.optimizer + moving
    needed = each * at_once + memory.trained
    own = _own_bytes(folder, step)
    missing = max(each, needed - own)
    place = next(path for path in (folder.path, *folder.path.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if missing > free:
        already = f", {missing / 1e9:.3g} GB more than it has already" if own else ""
        raise InputError(
            f"run.folder = {str(folder.path)!r}: {at_once} checkpoint{'s' * (at_once > 1)} of {each / 1e9:.3g} GB, as "
            f"many as there will be at once, and the trained model need {needed / 1e9:.3g} GB{already}, the disk has "
            f"{free / 1e9:.3g} GB free; make room, {'lower checkpoint.keep, ' * (at_once > 2)}or give another "
            "folder"
        )


def _own_bytes(folder: RunFolder, step: int | None) -> int:
    """Bytes that the run will delete by itself: its checkpoints, and what a kill left half-written."""
    kept = [place for place in list_checkpoints(folder.checkpoints) if step is None or step_of(place) <= step]
    files = (file for place in (*kept, *folder.leftovers()) for file in (place, *place.rglob("*")))
    return sum(file.stat().st_size for file in files if file.is_file())


def _run_command(command: str, folder: RunFolder, place: Path, step: int) -> None:
    """A command that fails cannot stop the run: there is a warning and an event."""
    environment = {"PODIUM_RUN": str(folder.path), "PODIUM_CHECKPOINT": str(place), "PODIUM_STEP": str(step)}
    process = subprocess.Popen(
        ["/bin/sh", "-c", GUARDED, "sh", command],
        env=os.environ | environment,
        stdin=subprocess.PIPE,  # never written to: it ends when this process does, however that ends
        start_new_session=True,
    )
    try:
        code = process.wait(timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=COMMAND_S)
        code = None
    finally:
        if process.stdin is not None:
            process.stdin.close()
    folder.event("on_checkpoint", step=step, exit_code=code)
    if code != 0:
        ended = f"ended with {code}" if code is not None else f"took over {COMMAND_S:g} s and was killed"
        warn(f"warning: checkpoint.on_checkpoint {ended} after step {step}; the run goes on")
