"""One checkpoint on disk: how it is written, verified, listed and read.

A folder with weights, optimizer and random states (`trainer.safetensors`), the state of the run and the length of its
ledger (`state.json`), its settings (`settings.toml`), and the length and sha256 of each file (`manifest.json`). It is
written under a temporary name, flushed to disk and renamed, so a checkpoint is either complete or absent. It holds
tensors and JSON only: nothing in it can be executed.
"""

import ctypes
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from podium.errors import CheckpointError
from podium.remote.files import open_regular, read_regular

FORMAT = 2
"""2 added the settings and the number of restarts; 1 had neither."""
_memcmp = ctypes.CDLL(None).memcmp  # more than twice as fast as torch.equal, and a NaN equals itself
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
MANIFEST, STATE, TENSORS, SETTINGS = "manifest.json", "state.json", "trainer.safetensors", "settings.toml"


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
            flush(path)
        unfinished.rename(place)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    flush(place.parent)
    flush(place.parent.parent)  # the first time, `checkpoints/` itself is new
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


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The contents of `state.json`, in the current format."""
    saved = json.loads(read_regular(checkpoint / STATE))
    if not 1 <= saved["format"] <= FORMAT:
        raise CheckpointError(
            f"{checkpoint} has format {saved['format']}; this version of Podium reads formats 1 to {FORMAT}: "
            "use the version that wrote it, or a newer one"
        )
    if saved["format"] == 1:
        saved |= {"restarts": 0}
    return saved


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


def describe_file(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def flush(path: Path) -> None:
    """Flushes a file, or a folder's entries, to disk; until it returns, a power cut may lose them."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _manifest_text(files: Mapping[str, Any]) -> str:
    """One canonical form, so that every changed byte is found."""
    return json.dumps(files, indent=1)
