"""Weights by id: a folder right under one root and nowhere else, checked before any of it is used."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, Field, ValidationError

from podium.errors import WeightsError
from podium.files import read_regular
from podium.model.handoff import manifest_of, read_published
from podium.model.load import Policy
from podium.server.refusal import Refusal

MAX_JSON_BYTES = 1 << 20


class AdapterShape(BaseModel):
    """What of an adapter's configuration decides its tensors and their effect. Plain LoRA only: a variant would be
    served with the wrong scale."""

    r: int = Field(ge=1, le=1024)
    lora_alpha: float = Field(gt=0, allow_inf_nan=False)
    target_modules: frozenset[str] = Field(min_length=1, max_length=256)
    use_rslora: Literal[False] = False
    use_dora: Literal[False] = False
    bias: Literal["none"] = "none"
    rank_pattern: dict[str, int] | None = Field(default=None, max_length=0)
    alpha_pattern: dict[str, float] | None = Field(default=None, max_length=0)
    modules_to_save: None = None

    @property
    def of_tensors(self) -> tuple[int, float, frozenset[str]]:
        return self.r, self.lora_alpha, self.target_modules

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AdapterShape) and self.of_tensors == other.of_tensors


@dataclass(frozen=True)
class Published:
    folder: Path
    shape: AdapterShape | None
    """None: full weights."""
    sha256: str
    """Of the file that holds the tensors."""


def locate(root: Path, name: str) -> Published:
    """The published folder of that name. Nothing is opened that is not, links resolved, right under the root."""
    folder = root / name
    _refuse_elsewhere(root, folder, name)  # first: what is elsewhere need not have a name that a manifest could have
    _refuse_elsewhere(root, manifest_of(folder), name)
    manifest = _json(manifest_of(folder), f"{name}.json")
    is_adapter = manifest.get("kind") == "adapter"
    file = "adapter_model.safetensors" if is_adapter else "model.safetensors"
    try:
        sha256 = str(manifest["files"][file]["sha256"])
        shape = AdapterShape.model_validate(_json(folder / "adapter_config.json", name)) if is_adapter else None
    except (KeyError, TypeError):
        raise WeightsError(f"{name}.json cannot be read") from None
    except ValidationError:
        raise WeightsError(f"{name}: adapter_config.json is not one of plain LoRA") from None
    return Published(folder, shape, sha256)


def _refuse_elsewhere(root: Path, path: Path, name: str) -> None:
    if path.resolve() != root.resolve() / path.name or path.is_symlink():
        raise Refusal(403, "weights are read from the server's root only")
    if not path.exists():
        raise Refusal(404, f"there are no weights called {name}")


def read(published: Published, policy: Policy, version: int) -> dict[str, torch.Tensor]:
    """The tensors, proven whole, of the right shapes and finite. Those of an adapter are on the policy's device."""
    found = read_published(published.folder, dict(policy.named_weights()), version)
    if policy.peft is None:
        return found
    return {name: tensor.to(policy.device) for name, tensor in found.items()}


def shape_of(policy: Policy) -> AdapterShape | None:
    if policy.peft is None:
        return None
    config = policy.peft.peft_config["default"]
    targets = config.target_modules
    modules = frozenset([targets] if isinstance(targets, str) else targets)
    return AdapterShape(r=config.r, lora_alpha=config.lora_alpha, target_modules=modules)


def _json(path: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads(read_regular(path, max_bytes=MAX_JSON_BYTES, follow_links=False))
        if not isinstance(value, dict):
            raise ValueError
    except (OSError, ValueError, RecursionError):
        raise WeightsError(f"{name}: {path.name} cannot be read") from None
    return value
