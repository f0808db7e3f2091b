"""`podium export` and `podium push`: the trained adapter, or merged plain weights, as a folder or on the model hub.

Merged weights are written, loaded again by transformers alone and compared with base + adapter before the folder gets
its final name. So an exported folder always behaves as the run did.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from podium.errors import CheckpointError, InputError, ParityError, PodiumError
from podium.export.model_card import curve, model_card
from podium.export.trained import Trained, find_trained, run_model
from podium.model.forward import head_weight
from podium.model.hub import hub_is_reachable
from podium.model.load import Policy, load_policy
from podium.run.checkpoint import find_damage, read_tensors
from podium.run.folder import RunFolder
from podium.settings.sections import Model
from podium.settings.tables import Settings

PROBE_TOKENS = 64
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Largest allowed difference of a logprob; merging into bfloat16 weights rounds."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    kind: str
    """"adapter" or "model"."""
    files: dict[str, int]
    """File name → bytes."""
    gap: float | None
    """Largest difference of a probe's logprobs from base + adapter; None if nothing was merged."""


def export(target: str, out: Path, *, merge: bool = False, step: int | None = None) -> Exported:
    """`target` is a run or an adapter folder; `step` selects one of the run's checkpoints instead of its end."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already; give a new folder")
    trained = _find(target, step)
    section = Settings.from_dict({"model": trained.model}).model.model_copy(update={"device": "cpu"})
    policy = load_policy(section, seed=0, weights=trained.weights)
    if merge and policy.peft is None:
        raise InputError(f"--merge has no effect: {target} trained every weight, so there is no adapter; leave it out")
    if step is not None and trained.run is not None:
        policy.load_trained(read_tensors(_checkpoint(trained.run, step)))
    unfinished = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    try:
        gap = _write(policy, section, unfinished, merge)
        kind = "adapter" if policy.peft is not None and not merge else "model"
        _write_card(unfinished, trained, section.name, kind, step)
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error.strerror}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Exported(kind, {path.name: path.stat().st_size for path in sorted(out.iterdir())}, gap)


def _find(target: str, step: int | None) -> Trained:
    path = Path(target).expanduser()
    if step is not None:
        run = RunFolder.open(path)
        return Trained(run_model(run), None, run)
    trained = find_trained(target)
    if trained.weights is None:
        raise InputError(f"{target} is neither a run folder nor an adapter folder: nothing was trained there")
    return trained


def _checkpoint(run: RunFolder, step: int) -> Path:
    place = run.checkpoints / f"step-{step:06d}"
    if not place.is_dir():
        there = sorted(int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-" + "[0-9]" * 6))
        raise InputError(f"no checkpoint of step {step}; there are: {', '.join(map(str, there)) or 'none'}")
    if complaint := find_damage(place):
        raise CheckpointError(f"{place} is damaged: {complaint}")
    return place


def _write(policy: Policy, section: Model, folder: Path, merge: bool) -> float | None:
    """Writes the weights and their config; returns how far merged weights differ from base + adapter."""
    if policy.peft is not None and not merge:
        policy.peft.save_pretrained(str(folder))
        return None
    probe = _probe(head_weight(policy.model).shape[0])
    expected = _logprobs(policy.model, probe)
    model = policy.model if policy.peft is None else policy.peft.merge_and_unload(safe_merge=True)
    model.save_pretrained(str(folder))
    policy.tokenizer.save_pretrained(str(folder))
    written = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=model.dtype, trust_remote_code=section.trust_remote_code, use_safetensors=True
    )
    gap = float((_logprobs(written, probe) - expected).abs().max())
    if not gap <= TOLERANCE[model.dtype]:
        raise ParityError(f"the written weights give logprobs that differ by {gap:.3g} from those of the trained model")
    return gap if merge else None


def _probe(rows: int) -> torch.Tensor:
    """Ids from the whole vocabulary."""
    return torch.tensor([[(7 * i * i + 3 * i + 1) % rows for i in range(PROBE_TOKENS)]])


@torch.no_grad()
def _logprobs(model: PreTrainedModel | Any, ids: torch.Tensor) -> torch.Tensor:
    """Logprobs of the whole vocabulary at every position, by the model's own forward pass, as users compute it."""
    return torch.log_softmax(model.eval()(input_ids=ids).logits.float(), dim=-1)


def _write_card(folder: Path, trained: Trained, base: str, kind: str, step: int | None) -> None:
    (folder / "README.md").write_text(model_card(trained.run, base, kind, step), encoding="utf-8")
    drawn = curve(trained.run, step) if trained.run is not None else None
    if drawn is not None:
        (folder / "curve.svg").write_text(drawn, encoding="utf-8")


class PushError(PodiumError):
    """The hub rejected the upload."""


def push(target: str, name: str, *, merge: bool, step: int | None, private: bool, dry_run: bool) -> Iterator[str]:
    """Yields lines for people. Checks that an upload is possible before exporting anything."""
    from httpx import HTTPError
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise InputError(f"{name!r} is not a valid repository name: {error}") from None
    if not dry_run and get_token() is None:
        raise InputError("no token for the model hub: run `hf auth login` or set HF_TOKEN; --dry-run needs none")
    if not dry_run and not hub_is_reachable():
        raise InputError("the model hub cannot be reached from here; `podium export` writes the same folder to disk")
    with tempfile.TemporaryDirectory(prefix="podium-push-") as scratch:
        folder = Path(scratch) / "model"
        made = export(target, folder, merge=merge, step=step)
        for file, size in made.files.items():
            yield f"{size:>14,}  {file}"
        if dry_run:
            yield f"nothing was sent; without --dry-run, these {len(made.files)} files go to {name}"
            return
        api = HfApi()
        try:
            url = api.create_repo(name, private=private, exist_ok=True)
            api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message=f"Trained by Podium: {made.kind}")
        except (HfHubHTTPError, HTTPError, OSError) as error:
            raise PushError(f"the hub rejected {name}: {str(error).strip().splitlines()[0]}") from None
        yield f"pushed to {url}"
