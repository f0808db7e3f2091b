"""Weights on their way to an engine that reads them from a folder.

`publish` writes a folder that PEFT or transformers would load too, and beside it `<id>.json` with the length and sha256
of each file, last: an id without that file is not there yet. `read_published` gives the tensors back by the names of
`Policy.named_weights`; what is damaged, of another shape or not finite is refused before an engine sees any of it.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from podium.errors import WeightsError
from podium.files import open_regular, read_regular
from podium.model.load import Policy

Named = Iterable[tuple[str, torch.Tensor]]
PEFT_PREFIX, PEFT_SUFFIX = "base_model.model.", ".weight"


def publish(root: Path, policy: Policy, weights: Named, version: int) -> Path:
    """A new folder under `root` with these weights; its name is the id that an engine is told."""
    folder = root / f"version-{version:06d}-{secrets.token_hex(4)}"
    folder.mkdir(parents=True)
    if policy.peft is None:
        policy.model.config.save_pretrained(folder)
        save_file(_on_cpu(weights), folder / "model.safetensors")
    else:
        write_adapter(folder, policy.peft.peft_config["default"], weights)
    files = {path.name: _described(path) for path in sorted(folder.iterdir())}
    manifest = {"version": version, "kind": "full" if policy.peft is None else "adapter", "files": files}
    unfinished = root / f"{folder.name}.json.tmp-{os.getpid()}"
    unfinished.write_text(json.dumps(manifest))
    unfinished.rename(manifest_of(folder))
    return folder


def in_saved_format(model: PreTrainedModel, weights: Named) -> Named:
    """Full weights by the names and in the pieces of a saved folder, which is what other libraries read.

    transformers keeps the experts of a layer as one tensor; a folder has one for each of them.
    """
    if not getattr(model, "_weight_conversions", None):
        return weights
    return revert_weight_conversion(model, dict(weights)).items()


def write_adapter(folder: Path, config: Any, weights: Named) -> None:
    """`adapter_config.json` and `adapter_model.safetensors`, as PEFT names things, and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"{PEFT_PREFIX}{name}{PEFT_SUFFIX}": tensor for name, tensor in _on_cpu(weights).items()}
    save_file(named, folder / "adapter_model.safetensors")
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    (folder / "adapter_config.json").write_text(json.dumps(plain, default=str))


def save_gathered(folder: Path, policy: Policy, weights: Named) -> None:
    """What a user takes away, of a model that does not hold its weights whole: an adapter folder or a model folder."""
    if policy.peft is not None:
        write_adapter(folder, policy.peft.peft_config["default"], weights)
        return
    policy.model.save_pretrained(folder, state_dict=dict(weights))
    policy.tokenizer.save_pretrained(folder)


def read_published(folder: Path, expected: Mapping[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """The tensors of a published folder, each with the shape of its namesake in `expected`."""
    manifest = read_manifest(folder)
    if manifest["version"] != version:
        raise WeightsError(f"{folder.name} holds version {manifest['version']}, not {version}")
    for name, described in manifest["files"].items():
        path = folder / name
        if path.name != name or not _is_as_described(path, described):
            raise WeightsError(f"{folder.name}: {name} is missing or not what was written")
    is_adapter = manifest["kind"] == "adapter"
    file = "adapter_model.safetensors" if is_adapter else "model.safetensors"
    if file not in manifest["files"]:
        raise WeightsError(f"{folder.name} has no {file}")
    try:
        with open_regular(folder / file, follow_links=False) as opened:
            found = load_file(f"/proc/self/fd/{opened.fileno()}")  # safetensors opens by name
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{folder.name}: {file} cannot be read: {error}") from None
    if is_adapter:
        found = {name.removeprefix(PEFT_PREFIX).removesuffix(PEFT_SUFFIX): tensor for name, tensor in found.items()}
    check_weights(found, expected, folder.name)
    return {name: found[name] for name in expected}


def check_weights(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], where: str) -> None:
    """Same names, same shapes, numbers only."""
    if set(found) != set(expected):
        odd = sorted(set(found) ^ set(expected))
        raise WeightsError(f"{where}: {len(odd)} tensors are missing or unknown to the model, the first is {odd[0]}")
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape:
            raise WeightsError(
                f"{where}: {name} has the shape {tuple(tensor.shape)}, the model's {tuple(expected[name].shape)}"
            )
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise WeightsError(f"{where}: {name} holds values that are no finite numbers")


Files = Mapping[str, np.ndarray]
"""A folder without folders in it: name → bytes, as arrays, which an object store hands on without a copy."""


@dataclass(frozen=True)
class Crate:
    """A published folder on its way to a machine that does not see the disk where it was written."""

    name: str
    manifest: str
    files: Files

    @property
    def sha256(self) -> str:
        """Of the file that holds the tensors, as the manifest has it."""
        [file] = [name for name in self.files if name.endswith(".safetensors")]
        return json.loads(self.manifest)["files"][file]["sha256"]


def read_files(folder: Path) -> dict[str, np.ndarray]:
    return {path.name: np.fromfile(path, dtype=np.uint8) for path in sorted(folder.iterdir())}


def write_files(files: Files, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        content.tofile(folder / name)


def pack_published(folder: Path) -> Crate:
    return Crate(folder.name, manifest_of(folder).read_text(), read_files(folder))


def unpack_published(crate: Crate, root: Path) -> Path:
    """The folder once more, under another root; its manifest last, as when it was published."""
    folder = root / crate.name
    write_files(crate.files, folder)
    manifest_of(folder).write_text(crate.manifest)
    return folder


def remove_published(folder: Path) -> None:
    """The id first, so that nobody begins to read what is going away."""
    manifest_of(folder).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def manifest_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def read_manifest(folder: Path) -> dict[str, Any]:
    """What stands beside the folder: version, kind, and each file's length and hash."""
    try:
        manifest = json.loads(read_regular(manifest_of(folder)))
        if manifest["kind"] not in ("adapter", "full") or type(manifest["version"]) is not int:
            raise ValueError
        if not all(isinstance(name, str) for name in manifest["files"]):
            raise ValueError
    except OSError:
        raise WeightsError(f"there are no weights called {folder.name}") from None
    except (ValueError, KeyError, TypeError):
        raise WeightsError(f"{folder.name}.json cannot be read") from None
    return manifest


def _on_cpu(weights: Named) -> dict[str, torch.Tensor]:
    """Contiguous copies that share nothing, as the file format wants them."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights}


def _described(path: Path) -> dict[str, Any]:
    with open_regular(path, follow_links=False) as file:
        size = os.fstat(file.fileno()).st_size
        return {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _is_as_described(path: Path, described: Any) -> bool:
    try:
        return _described(path) == described
    except OSError:
        return False
