"""What may change when a run is resumed: every setting belongs to one of three classes.

free: it is the same run, longer or reported differently. warn: it is the same run, but no longer bit for bit what it
would have been. refuse: it would be another run; `--allow-change KEY` overrides.

The run's length is free unless the learning rate decays over it. Another length then means another rate from here on,
and the error shows both rates.
"""

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

from podium.errors import InputError
from podium.settings.tables import Settings
from podium.trainer._optimizer import rate_at

Class = Literal["free", "warn", "refuse"]

CLASSES: dict[str, Class] = {
    "run.folder": "refuse",
    "run.steps": "free",
    "run.epochs": "free",
    "run.seed": "refuse",
    "run.prompts_per_step": "refuse",
    "run.rollouts_per_prompt": "refuse",
    "run.sync_every": "refuse",
    "run.max_lag": "refuse",
    "run.in_flight": "refuse",
    "model.name": "refuse",
    "model.dtype": "refuse",
    "model.device": "warn",
    "model.lora": "refuse",
    "model.reference": "refuse",
    "model.trust_remote_code": "refuse",
    "data": "refuse",
    "rollout": "refuse",
    "engine": "warn",
    "reward": "refuse",
    "reward.timeout_s": "warn",
    "scoring.max_failed_share": "free",
    "scoring.worker_memory_mb": "warn",
    "filter.truncated": "warn",
    "filter.accept": "warn",
    "filter.refill": "warn",
    "filter.retire_pass_rate": "warn",
    "advantage": "refuse",
    "pack.max_tokens_per_batch": "warn",
    "pack.shared_prefix": "warn",
    "loss": "refuse",
    "trainer": "warn",
    "trainer.name": "refuse",
    "trainer.optimizer": "refuse",
    "trainer.epochs_per_batch": "refuse",
    "trainer.minibatches_per_step": "refuse",
    "sync": "warn",
    "checkpoint.every": "free",
    "checkpoint.keep": "free",
    "checkpoint.start_from": "refuse",
    "checkpoint.on_checkpoint": "free",
    "eval": "free",
    "report": "free",
    "runtime": "warn",
    "runtime.warm": "free",
    "runtime.rollout_memory": "free",
    "runtime.trainer_memory": "free",
    "runtime.image": "free",
    "runtime.hub_token_from": "free",
    "runtime.rollout_workers": "warn",
    "runtime.reward_workers": "free",
    "runtime.gpus_per_rollout_worker": "free",
    "runtime.gpus_per_rank": "free",
    "runtime.cpus_per_worker": "free",
    "runtime.address": "free",
    "runtime.linger_s": "free",
    "runtime.start_s": "free",
    "runtime.frozen_s": "free",
    "runtime.stalled_s": "free",
    "runtime.recovery_s": "free",
    "runtime.max_restarts": "free",
}
"""Setting → class. A section's own name stands for its settings that are not listed: the options of a choice, and
tables within a table."""


LENGTHS = ("run.steps", "run.epochs")
"""Settings that determine the length over which a learning rate decays."""


def class_of(key: str) -> Class | None:
    """The class of a dotted key such as `data.0.path`; the nearest listed name above it counts."""
    parts = [part for part in key.split(".") if not part.isdigit()]
    for length in range(len(parts), 0, -1):
        if found := CLASSES.get(".".join(parts[:length])):
            return found
    return None


def changes(before: Settings, after: Settings) -> dict[str, tuple[Any, Any]]:
    """Dotted key → (old, new) for every setting that differs; None for a missing value."""
    old, new = dict(_flat(before.to_dict())), dict(_flat(after.to_dict()))
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
        is_accepted = key in accepted and accepted[key] == new
        if key in LENGTHS and (stretched := _stretched(before, after, step)):
            change = f"{key} changes from {old!r} to {new!r} and {stretched}"
            if not is_accepted and not _is_allowed(key, allowed):
                raise InputError(
                    f"{change}. Keep {key} and start a new run from this one's weights (checkpoint.start_from), add "
                    f"--trainer.schedule=constant --trainer.lr=RATE, or insist with --allow-change {key}"
                )
            warnings.append(f"warning: {change}")
            continue
        found = class_of(key)
        if found != "free" and not is_accepted and not _is_allowed(key, allowed):
            if found != "warn":
                raise InputError(
                    f"{key} cannot change on resume: the run would no longer be the same one. "
                    f"Free: {', '.join(_free())}; to insist, add --allow-change {key}"
                )
            rates = _rates(before, after, step) if key == "trainer.schedule" else ""
            warnings.append(
                f"warning: {key} changes from {old!r} to {new!r}: from here on it is not the run it was"
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


def _free() -> list[str]:
    return [key if "." in key else f"{key}.*" for key, found in CLASSES.items() if found == "free"]


def _flat(tables: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The leaves of nested tables by dotted key; an empty table counts as a leaf."""
    inner = tables.items() if isinstance(tables, Mapping) else enumerate(tables) if _is_list_of_tables(tables) else None
    if inner is None or not tables:
        yield ".".join(path), tables
        return
    for key, value in inner:
        yield from _flat(value, (*path, str(key)))


def _is_list_of_tables(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Mapping) for item in value)
