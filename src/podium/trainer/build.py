"""From `[trainer]` to the trainer stage, and what the trainer needs of this machine."""

from typing import Any

import torch

from podium.errors import InputError
from podium.model.load import Policy, choose_device
from podium.records import ReferenceSettings
from podium.settings.contracts import checked, is_users, user_code
from podium.settings.lookup import find, option_fields
from podium.settings.sections import SeparateReference
from podium.settings.tables import Settings
from podium.stages import Loss
from podium.trainer import check_optimizer


def check_trainer(settings: Settings) -> None:
    """Checks what the trainer needs of this machine, before the model is loaded."""
    check_reference(settings)
    check_optimizer(settings.trainer.options.get("optimizer", "adamw"), choose_device(settings.model.device))


def check_reference(settings: Settings) -> None:
    """Checks that the device of a separate reference exists on this machine; a cluster has its own devices."""
    given = settings.model.reference
    if not isinstance(given, SeparateReference) or given.device == "cpu" or settings.runtime.name != "local":
        return
    number, there = int(given.device.partition(":")[2] or 0), torch.cuda.device_count()
    if number >= there:
        names = ", ".join(["cpu", *(f"cuda:{index}" for index in range(there))])
        raise InputError(f"model.reference.device = {given.device!r}: there is no such device; there are: {names}")


def build_trainer(
    settings: Settings, policy: Policy, objective: Loss, num_steps: int, gradient_checkpointing: bool
) -> Any:
    """`num_steps` of the whole run, for the learning rate's schedule; `gradient_checkpointing` as planned."""
    options = settings.trainer.options | {"gradient_checkpointing": gradient_checkpointing}
    wiring = (policy, objective, num_steps, build_reference(settings), settings.pack.shared_prefix)
    name = settings.trainer.name
    make = find("trainer", name)
    if is_users(name) and "gradient_checkpointing" not in option_fields(make):
        del options["gradient_checkpointing"]
    with user_code("trainer.name", name):
        return checked("trainer", name, make(*wiring, **options))


def build_reference(settings: Settings) -> ReferenceSettings | None:
    """The reference that the trainer itself keeps; None without one, or where it is in a process of its own."""
    given = settings.model.reference
    if given is None or isinstance(given, SeparateReference):
        return None
    return ReferenceSettings() if given == "initial" else ReferenceSettings(given.alpha, given.every)
