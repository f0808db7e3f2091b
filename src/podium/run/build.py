"""From `[checkpoint]` to the checkpoint stage, and what may change when a run is resumed.

In: the settings, the run folder and the trainer. Out: `FolderCheckpoint`. Here are also the weights that a run starts
from, and the room that checkpoints need on the disk.

Every setting belongs to one of three classes. free: it is the same run, longer or reported differently. warn: it is the
same run, but no longer bit for bit what it would have been. refuse: it would be another run; `--allow-change KEY`
overrides. The run's length is free unless the learning rate decays over it: another length then means another rate from
here on, and the error shows both rates.
"""

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from podium.errors import CheckpointError, InputError, WeightsError
from podium.model.evidence import named_trained
from podium.model.handoff import PEFT_PREFIX, PEFT_SUFFIX, check_weights
from podium.model.load import Policy
from podium.records import RunState
from podium.run.checkpoint import (
    FolderCheckpoint,
    list_checkpoints,
    newest_checkpoint,
    read_tensors,
    step_of,
)
from podium.run.folder import Ledger, RunFolder, flattened
from podium.settings.tables import Settings
from podium.stages import SavedTrainer
from podium.trainer import rate_at
from podium.untrusted import warn

CLASS_TABLE = """
free    run.steps run.epochs
refuse  run.folder run.seed run.prompts_per_step run.rollouts_per_prompt run.sync_every run.max_lag run.in_flight
refuse  model.name model.dtype model.lora model.reference model.trust_remote_code
warn    model.device
refuse  data rollout tool environment reward advantage loss
warn    engine sync runtime reward.timeout_s
free    scoring.max_failed_share
warn    scoring.worker_memory_mb
warn    filter.truncated filter.accept filter.refill filter.retire_pass_rate
warn    pack.max_tokens_per_batch pack.shared_prefix
warn    trainer
refuse  trainer.name trainer.optimizer trainer.epochs_per_batch trainer.minibatches_per_step
free    checkpoint.every checkpoint.keep checkpoint.on_checkpoint
refuse  checkpoint.start_from
free    eval report
free    runtime.warm runtime.rollout_memory runtime.trainer_memory runtime.image runtime.hub_token_from
free    runtime.reward_workers runtime.gpus_per_rollout_worker runtime.gpus_per_rank runtime.cpus_per_worker
free    runtime.address runtime.linger_s runtime.start_s runtime.frozen_s runtime.stalled_s runtime.recovery_s
free    runtime.max_restarts
"""
CLASSES = {key: found for found, *keys in map(str.split, CLASS_TABLE.strip().splitlines()) for key in keys}
"""Setting → class. A section's own name stands for its settings that are not listed: the options of a choice, and
tables within a table."""
LENGTHS = ("run.steps", "run.epochs")
"""Settings that determine the length over which a learning rate decays."""
OTHER_SCALES = ("use_rslora", "rank_pattern", "alpha_pattern")
"""Keys of an adapter_config.json that scale an adapter otherwise than by alpha / r."""


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
    store: Callable[[Path], None] | None,
    restored: Callable[[RunState, Path | None], None],
) -> FolderCheckpoint:
    """`step` and everything after it are as in `FolderCheckpoint`."""
    if settings.run.sync_every == 0:
        begin()  # the engine is given these weights before a checkpoint is restored

    def accept(text: str, step: int) -> None:
        _accept_settings(Settings.stored(text), settings, folder, step)

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
        begin=begin,
        accept=accept,
        restored=restored,
        store=store,
        command=settings.checkpoint.on_checkpoint,
    )


# What may change on a resume


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


def class_of(key: str) -> str | None:
    """The class of a dotted key such as `data.0.path`; the nearest listed name above it counts."""
    parts = [part for part in key.split(".") if not part.isdigit()]
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((CLASSES[name] for name in names if name in CLASSES), None)


def changes(before: Settings, after: Settings) -> dict[str, tuple[Any, Any]]:
    """Dotted key → (old, new) for every setting that differs; None for a missing value."""
    old, new = flattened(before.to_dict()), flattened(after.to_dict())
    return {key: (old.get(key), new.get(key)) for key in sorted({*old, *new}) if old.get(key) != new.get(key)}


def check_changes(
    before: Settings,
    after: Settings,
    allowed: Collection[str] = (),
    step: int | None = None,
    accepted: Mapping[str, Any] = MappingProxyType({}),
) -> list[str]:
    """Returns warnings; a change that makes it another run raises `InputError` unless it is `allowed`.

    `step` is the step from which the run continues, if known. `accepted`: dotted key → a new value that was accepted
    before; a change to exactly that value causes no warning.
    """
    warnings = []
    for key, (old, new) in changes(before, after).items():
        change = f"{key} changes from {old!r} to {new!r}"
        is_accepted = key in accepted and accepted[key] == new
        is_allowed = is_accepted or _is_allowed(key, allowed)
        if key in LENGTHS and (stretched := _stretched(before, after, step)):
            if not is_allowed:
                raise InputError(
                    f"{change} and {stretched}. Keep {key} and start a new run from this one's weights "
                    "(checkpoint.start_from), add --trainer.schedule=constant --trainer.lr=RATE, or insist with "
                    f"--allow-change {key}"
                )
            warnings.append(f"warning: {change} and {stretched}")
        elif (found := class_of(key)) != "free" and not is_allowed:
            if found != "warn":
                free = [name if "." in name else f"{name}.*" for name, each in CLASSES.items() if each == "free"]
                raise InputError(
                    f"{key} cannot change on resume: the run would no longer be the same one. "
                    f"Free: {', '.join(free)}; to insist, add --allow-change {key}"
                )
            rates = _rates(before, after, step) if key == "trainer.schedule" else ""
            warnings.append(
                f"warning: {change}: from here on it is not the run it was"
                f"{rates and f'; the learning rate changes{rates}'}"
            )
    return warnings


def _stretched(before: Settings, after: Settings, step: int | None) -> str | None:
    """What another length does to a learning rate that decays over it; None if it did not decay, or no longer does:
    the changed schedule then has its own warning."""
    schedules = [settings.trainer.options.get("schedule", "constant") for settings in (before, after)]
    if "constant" in schedules:
        return None
    words = f"trainer.schedule = {schedules[1]!r} decays over the run's length: the learning rate changes"
    rates = _rates(before, after, step)
    return f"{words},{rates}" if rates else words


def _rates(before: Settings, after: Settings, step: int | None) -> str:
    """The learning rate after `step`, as it would have been and as it will be; empty if it cannot be computed."""
    if step is None or before.run.epochs or after.run.epochs:
        return ""
    rates = []
    for settings in (before, after):
        options = settings.trainer.options
        if not isinstance(options.get("lr"), float):
            return ""
        shape = {"warmup_steps": options.get("warmup_steps", 0), "schedule": options.get("schedule", "constant")}
        rates.append(rate_at(options["lr"], step, total_steps=settings.run.steps, **shape))
    return f" after step {step} from {rates[0]:.3g} to {rates[1]:.3g}"


def _is_allowed(key: str, allowed: Collection[str]) -> bool:
    """Whether `allowed` names the key, a table around it, or the choice whose option it is."""
    section = key.partition(".")[0]
    return any(key == name or key.startswith(f"{name}.") or name == f"{section}.name" for name in allowed)


# The weights that a run starts from


def check_start(settings: Settings) -> None:
    """Checks that the weights that a run starts from exist, before a model is loaded."""
    if (place := settings.checkpoint.start_from) is None:
        return
    with _named(place) as folder:
        if not _is_adapter(folder):
            newest_checkpoint(folder)
            return
        _adapter_config(folder)
    if settings.model.lora is False:
        raise InputError(
            f"checkpoint.start_from = {str(place)!r} is a LoRA folder, and model.lora = false trains no adapter; set a "
            "[model.lora] table or give a checkpoint"
        )


def load_start(settings: Settings, policy: Policy, trainer: Any) -> None:
    """Loads the weights of `start_from` into the trainer; its optimizer and counters stay new.

    With several ranks, their weights are compared, whatever they start from.
    """
    if hasattr(trainer, "check_same"):
        trainer.check_same("after the model was loaded")
    if (place := settings.checkpoint.start_from) is None:
        return
    with _named(place) as folder:
        if _is_adapter(folder):
            trainer.load_weights(_adapter_weights(policy, folder))
        else:
            trainer.load_weights(read_tensors(newest_checkpoint(folder)))


def _is_adapter(folder: Path) -> bool:
    """Whether it is a LoRA folder, and not a checkpoint or a run."""
    return (folder / "adapter_config.json").is_file()


@contextmanager
def _named(path: Path) -> Iterator[Path]:
    """Problems with a folder that the user gave become an `InputError` that names the setting."""
    try:
        yield path.expanduser()
    except (OSError, ValueError, CheckpointError, WeightsError, SafetensorError) as error:
        raise InputError(f"checkpoint.start_from = {str(path)!r}: {error}") from None


def _adapter_config(folder: Path) -> dict[str, Any]:
    if not (folder / "adapter_model.safetensors").is_file():
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
    own = dict(named_trained(policy.model))
    # Names and numbers. The trainer knows the shapes: where weights are spread over ranks, a parameter here does not.
    check_weights(found, {name: found.get(name, parameter) for name, parameter in own.items()}, folder.name)
    names = {id(parameter): name for name, parameter in policy.trained_parameters().items()}
    return {f"weights.{names[id(parameter)]}": found[name] for name, parameter in own.items()}


# Room on the disk


def check_space(settings: Settings, folder: RunFolder, memory: StateBytes, step: int | None = None) -> None:
    """Checks that the disk has room for the kept checkpoints, one more being written, and the trained model.

    A run with fewer commits needs room for fewer. A resumed run deletes by itself what a kill left half-written and the
    checkpoints that it finds, except those after the `step` that it begins from.
    """
    keep, every = settings.checkpoint.keep, settings.checkpoint.every
    commits = -(-settings.run.steps // every) if every else 1
    at_once = min(keep + 1, commits)
    moving = memory.reference if settings.model.reference not in (None, "initial") else 0
    each = memory.trained + memory.optimizer + moving
    needed = each * at_once + memory.trained
    kept = [place for place in list_checkpoints(folder.checkpoints) if step is None or step_of(place) <= step]
    files = (file for place in (*kept, *folder.leftovers()) for file in (place, *place.rglob("*")))
    own = sum(file.stat().st_size for file in files if file.is_file())
    place = next(path for path in (folder.path, *folder.path.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if max(each, needed - own) > free:
        already = f", {max(each, needed - own) / 1e9:.3g} GB more than it has already" if own else ""
        raise InputError(
            f"run.folder = {str(folder.path)!r}: {at_once} checkpoint{'s' * (at_once > 1)} of {each / 1e9:.3g} GB, as "
            f"many as there will be at once, and the trained model need {needed / 1e9:.3g} GB{already}, the disk has "
            f"{free / 1e9:.3g} GB free; make room, {'lower checkpoint.keep, ' * (at_once > 2)}or give another "
            "folder"
        )
