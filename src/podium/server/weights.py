"""Weights that come in: by id from a folder right under one root, checked before any of it is used, or from GPU to GPU.

    POST /join_transfer    meets the trainer, once (sync/nccl.py)
    POST /receive_weights  takes what the trainer is broadcasting now

Of a transfer only names, kinds and shapes come by HTTP. An engine without GPUs of its own, or one that serves an
adapter, refuses it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, ValidationError

from podium.errors import WeightsError
from podium.model.handoff import in_saved_format, manifest_of, read_published
from podium.model.load import Policy
from podium.remote.files import read_regular
from podium.server.door import Refusal
from podium.server.wire import Body, RunId

if TYPE_CHECKING:
    from podium.server.served import Served

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


Name = Annotated[str, Field(min_length=1, max_length=256)]


class Join(Body):
    master_address: Annotated[str, Field(pattern=r"^[A-Za-z0-9.:-]{1,253}\z")]
    master_port: Annotated[int, Field(ge=1, le=65535)]
    world_size: Annotated[int, Field(ge=2, le=4096)]
    rank_offset: Annotated[int, Field(ge=1, le=4096)]
    run: RunId | None = None


class Receive(Body):
    names: Annotated[list[Name], Field(min_length=1, max_length=10_000)]
    dtype_names: list[Annotated[str, Field(pattern=r"^(float32|bfloat16|float16)\z")]]
    shapes: list[Annotated[list[Annotated[int, Field(ge=1, lt=1 << 40)]], Field(max_length=6)]]
    version: Annotated[int, Field(ge=0, lt=1 << 40)]
    run: RunId | None = None


class Transfer:
    def __init__(self, served: "Served") -> None:
        self._served = served

    def add_to(self, app: FastAPI) -> None:
        app.post("/join_transfer")(self.join)
        app.post("/receive_weights")(self.receive)

    async def join(self, body: Join) -> JSONResponse:
        engine = self._able(body.run)
        await engine.join_transfer(body.model_dump(exclude={"run"}))
        return JSONResponse({"ranks": self._served.engine.traits.transfer_ranks})

    async def receive(self, body: Receive) -> JSONResponse:
        engine = self._able(body.run)
        self._check_shapes(body)
        update = body.model_dump(include={"names", "dtype_names", "shapes"})
        await self._served.take_transfer(lambda: engine.receive_weights(update, body.version), body.run)
        return JSONResponse({"version": body.version})

    def _able(self, run: str | None) -> Any:
        self._served.claims.check_writer(run)
        if not self._served.engine.traits.transfer_ranks:
            raise Refusal(422, "this engine takes no weights by NCCL; hand them over by folder")
        return self._served.engine

    def _check_shapes(self, body: Receive) -> None:
        """Before any tensor comes: what does not fit would overwrite what is served."""
        policy = self._served.policy
        saved = in_saved_format(policy.model, policy.named_weights())
        mine = {name: list(tensor.shape) for name, tensor in saved}
        if len(body.names) != len(body.shapes) or len(body.names) != len(body.dtype_names):
            raise Refusal(422, "names, dtype_names and shapes must have one entry a tensor")
        if dict(zip(body.names, body.shapes, strict=True)) != mine:
            raise Refusal(422, "the tensors are not those of the model that is served")
