"""Sends weights to an engine that reads them from a folder.

`publish` writes a folder that PEFT or transformers could load too. Last, it writes `<id>.json` next to the folder, with
the length and sha256 of each file: an id without that file does not exist yet. `read_published` returns the tensors by
the names of `evidence.named_trained`. It rejects damaged files, other shapes and values that are not finite before an
engine sees any of them.
"""

import hashlib
import json
import mmap
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from podium.errors import WeightsError
from podium.model.load import Policy
from podium.untrusted import open_regular, read_regular

Named = Iterable[tuple[str, torch.Tensor]]
PEFT_PREFIX, PEFT_SUFFIX = "base_model.model.", ".weight"


def publish(root: Path, policy: Policy, weights: Named, version: int) -> Path:
    """Writes these weights to a new folder under `root`; the folder's name is the id that the engine gets."""
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
    """Full weights under the names and in the shapes of a saved folder, which other libraries read.

    transformers keeps the experts of a layer as one tensor; a saved folder has one tensor per expert.
    """
    if not getattr(model, "_weight_conversions", None):
        return weights
    return revert_weight_conversion(model, dict(weights)).items()


def write_adapter(folder: Path, config: Any, weights: Named) -> None:
    """Writes what PEFT would write: `adapter_config.json` and `adapter_model.safetensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"{PEFT_PREFIX}{name}{PEFT_SUFFIX}": tensor for name, tensor in _on_cpu(weights).items()}
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})
    saved = config.to_dict() | {"inference_mode": True}
    (folder / "adapter_config.json").write_text(json.dumps(saved, indent=2, sort_keys=True, default=str))


def save_gathered(folder: Path, policy: Policy, weights: Named) -> None:
    """Saves a model whose weights are sharded, for users: an adapter folder or a model folder."""
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
        try:
            is_intact = Path(name).name == name and _described(folder / name) == described
        except OSError:
            is_intact = False
        if not is_intact:
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
    """Raises `WeightsError` unless names and shapes are the expected ones and all values are finite numbers."""
    if set(found) != set(expected):
        odd = sorted(set(found) ^ set(expected))
        raise WeightsError(f"{where}: {len(odd)} tensors are missing or unknown to the model, the first is {odd[0]}")
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape:
            raise WeightsError(
                f"{where}: {name} has the shape {tuple(tensor.shape)}, the model's {tuple(expected[name].shape)}"
            )
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise WeightsError(f"{where}: {name} holds values that are not finite numbers")


Files = Mapping[str, tuple[memoryview, ...]]
"""A flat folder: file name → its bytes in pieces, which the codec (remote/codec.py) does not copy."""
PIECE_BYTES = 1 << 30


@dataclass(frozen=True)
class PackedFolder:
    """A published folder as a record, for a machine that cannot read the disk where it was written."""

    name: str
    manifest: str
    files: Files

    @property
    def sha256(self) -> str:
        """The hash of the file with the tensors, from the manifest."""
        [file] = [name for name in self.files if name.endswith(".safetensors")]
        return json.loads(self.manifest)["files"][file]["sha256"]


def read_files(folder: Path) -> Files:
    """Maps the files into memory; the files on disk may be removed afterwards."""
    return {path.name: _mapped(path) for path in sorted(folder.iterdir())}


def _mapped(path: Path) -> tuple[memoryview, ...]:
    size = path.stat().st_size
    if not size:
        return ()
    with open(path, "rb") as file:
        content = memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ))
    return tuple(content[start : start + PIECE_BYTES] for start in range(0, size, PIECE_BYTES))


def write_files(files: Files, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, pieces in files.items():
        with open(folder / name, "wb") as file:
            file.writelines(pieces)


def pack_published(folder: Path) -> PackedFolder:
    return PackedFolder(folder.name, manifest_of(folder).read_text(), read_files(folder))


def unpack_published(packed: PackedFolder, root: Path) -> Path:
    """Writes the folder again under another root; its manifest comes last, as in `publish`."""
    folder = root / packed.name
    write_files(packed.files, folder)
    manifest_of(folder).write_text(packed.manifest)
    return folder


def remove_published(folder: Path) -> None:
    """Removes the manifest first, so that no engine starts to read a folder that is being deleted."""
    manifest_of(folder).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def manifest_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


class Manifest(TypedDict):
    """The JSON file next to a published folder."""

    version: int
    kind: Literal["adapter", "full"]
    files: dict[str, dict[str, Any]]
    """File name → its length in `bytes` and its `sha256`."""


def read_manifest(folder: Path) -> Manifest:
    try:
        return msgspec.json.decode(read_regular(manifest_of(folder)), type=Manifest)
    except OSError:
        raise WeightsError(f"there are no weights called {folder.name}") from None
    except ValueError:
        raise WeightsError(f"{folder.name}.json cannot be read") from None


def _on_cpu(weights: Named) -> dict[str, torch.Tensor]:
    """Contiguous copies that share no memory, as the file format needs them."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights}


def _described(path: Path) -> dict[str, Any]:
    with open_regular(path, follow_links=False) as file:
        size = os.fstat(file.fileno()).st_size
        return {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
