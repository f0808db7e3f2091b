"""`podium export`: a promotable folder (an adapter, or a model) out of a resumable checkpoint."""

import os
import shutil
from pathlib import Path

from podium.checkpoint import newest_checkpoint
from podium.checkpoint_files import list_checkpoints, read_tensors, step_of
from podium.errors import InputError
from podium.model.load import load_policy
from podium.run_folder import RunFolder
from podium.settings import Settings


def export(settings: Settings, folder: RunFolder, out: Path, *, step: int | None = None, merge: bool = False) -> int:
    """Writes `out`, whole or not at all, and returns the step that it is of. `merge`: a LoRA run as a full model."""
    if out.exists():
        raise InputError(f"{out} exists already; give a new folder")
    if merge and settings.model.lora is False:
        raise InputError("--merge has no effect: this run trains every weight; remove it")
    steps = [step_of(place) for place in list_checkpoints(folder.checkpoints)]
    if step is not None and step not in steps:
        raise InputError(f"no checkpoint of step {step}; there are: {', '.join(map(str, steps)) or 'none'}")
    place = newest_checkpoint(folder.path if step is None else folder.checkpoints / f"step-{step:06d}")
    policy = load_policy(settings.model, seed=settings.run.seed)
    policy.load_trained(read_tensors(place))
    unfinished = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    try:
        policy.save(str(unfinished), merge=merge)
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return step_of(place)
