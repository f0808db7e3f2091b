"""What a runtime adds to checkpoints: weights to start from, room on the disk, settings that may change, a command."""

import json
import os
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from podium.checkpoint import FolderCheckpoint, Hooks, newest_checkpoint
from podium.checkpoint_files import list_checkpoints, read_tensors, step_of
from podium.data._order import OrderedData
from podium.errors import CheckpointError, InputError, WeightsError
from podium.ledger import Ledger
from podium.model.handoff import PEFT_PREFIX, PEFT_SUFFIX, check_weights
from podium.model.load import Policy
from podium.resume_rules import changes, check_changes
from podium.run_folder import RunFolder
from podium.runtime._memory import MemoryPlan
from podium.settings import Settings
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
"""A shell that runs a command, and beside it one that kills their whole process group when its input ends."""


def build_checkpoint(
    settings: Settings,
    folder: RunFolder,
    trainer: Any,
    ledger: Ledger,
    data: OrderedData,
    step: int | None,
    begin: Callable[[], None],
    base_digest: str | None,
) -> FolderCheckpoint:
    """`step` names the checkpoint to go on from; `begin` gives the trainer the weights that a new run starts from;
    `base_digest` is that of the weights under its adapter."""
    if settings.run.sync_every == 0:
        begin()  # the engine is given them before a checkpoint is restored
    hooks = checkpoint_hooks(settings, folder, begin)
    given, others = settings.checkpoint, {"step": step, "base_digest": base_digest, "hooks": hooks}
    wiring: Any = (folder, trainer, ledger, data.fingerprint, settings.to_toml())
    return FolderCheckpoint(*wiring, every=given.every, keep=given.keep, **others)


def checkpoint_hooks(settings: Settings, folder: RunFolder, begin: Callable[[], None]) -> Hooks:
    """`begin` gives the trainer the weights that a new run starts from."""
    command = settings.checkpoint.on_checkpoint

    def accept(text: str, step: int) -> None:
        _accept_settings(Settings.from_dict(tomllib.loads(text)), settings, folder, step)

    def committed(place: Path, step: int) -> None:
        if command is not None:
            _run_command(command, folder, place, step)

    return Hooks(begin, accept, committed, warn)


def _accept_settings(before: Settings, after: Settings, folder: RunFolder, step: int) -> None:
    """The settings of the checkpoint against today's, which also finds a settings.toml that was edited by hand.

    The value that was accepted last stays accepted, so that a run that was killed before it had a checkpoint with that
    value goes on. Any other value is judged anew.
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
    """That what a run starts from is there, before a model is loaded."""
    given = settings.checkpoint
    if given.start_from is not None:
        _named("checkpoint.start_from", given.start_from, newest_checkpoint)
    if given.adapter_from is not None:
        _named("checkpoint.adapter_from", given.adapter_from, _adapter_config)


def load_start(settings: Settings, policy: Policy, trainer: Any) -> None:
    """The weights of `start_from` or `adapter_from` into the trainer; its optimizer and counters stay new.

    Several ranks are compared, whatever they start from.
    """
    given = settings.checkpoint
    if hasattr(trainer, "check_same"):
        trainer.check_same("after the model was loaded")
    if given.start_from is not None:
        _named(
            "checkpoint.start_from",
            given.start_from,
            lambda place: trainer.load_weights(read_tensors(newest_checkpoint(place))),
        )
    if given.adapter_from is not None:
        _named(
            "checkpoint.adapter_from",
            given.adapter_from,
            lambda folder: trainer.load_weights(_adapter_weights(policy, folder)),
        )


def _named(key: str, path: Path, read: Callable[[Path], Any]) -> Any:
    """What is wrong with a folder is the user's to mend, and the message names the setting."""
    try:
        return read(path.expanduser())
    except (OSError, ValueError, CheckpointError, WeightsError, SafetensorError) as error:
        raise InputError(f"{key} = {str(path)!r}: {error}") from None


def _adapter_config(folder: Path) -> dict[str, Any]:
    if not (folder / "adapter_config.json").is_file() or not (folder / "adapter_model.safetensors").is_file():
        raise InputError("no LoRA folder: it needs adapter_config.json and adapter_model.safetensors")
    return json.loads((folder / "adapter_config.json").read_text())


def _adapter_weights(policy: Policy, folder: Path) -> dict[str, torch.Tensor]:
    """The adapter of a LoRA folder by the names of a checkpoint, as every rank's trainer takes it.

    Only tensors are read; the adapter's shape and scale are those of the settings and must agree.
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


def check_space(settings: Settings, folder: RunFolder, memory: MemoryPlan, step: int | None = None) -> None:
    """Room for the checkpoints that are kept, one more while it is written, and the trained model.

    A run that commits less often than that has fewer. Checkpoints that a resumed run finds give way to its new ones,
    but for those after the `step` that it begins from.
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
    """Of what the run will delete by itself: its checkpoints, and what a kill left half-written."""
    kept = [place for place in list_checkpoints(folder.checkpoints) if step is None or step_of(place) <= step]
    files = (file for place in (*kept, *folder.leftovers()) for file in (place, *place.rglob("*")))
    return sum(file.stat().st_size for file in files if file.is_file())


def _run_command(command: str, folder: RunFolder, place: Path, step: int) -> None:
    """It cannot stop the run: what fails is told and noted."""
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
