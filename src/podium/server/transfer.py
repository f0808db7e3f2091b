"""Weights from GPU to GPU, past every folder: the server's side of sync/nccl.py.

    POST /join_transfer    meets the trainer, once
    POST /receive_weights  takes what the trainer is broadcasting now

Only names, kinds and shapes come by HTTP. An engine without GPUs of its own, or one that serves an adapter, refuses.
"""

from typing import Annotated, Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import Field

from podium.model.handoff import in_saved_format
from podium.server.refusal import Refusal
from podium.server.served import Served
from podium.server.wire import Body, RunId

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


def transfer_ranks(served: Served) -> int:
    """GPUs that would meet the trainer; 0 where this engine cannot."""
    engine: Any = served.engine
    is_able = hasattr(engine, "join_transfer") and served.policy.peft is None and served.policy.device.type == "cuda"
    return engine.tensor_parallel if is_able else 0


class Transfer:
    def __init__(self, served: Served) -> None:
        self._served = served

    def add_to(self, app: FastAPI) -> None:
        app.post("/join_transfer")(self.join)
        app.post("/receive_weights")(self.receive)

    async def join(self, body: Join) -> JSONResponse:
        engine = self._able(body.run)
        await engine.join_transfer(body.model_dump(exclude={"run"}))
        return JSONResponse({"ranks": transfer_ranks(self._served)})

    async def receive(self, body: Receive) -> JSONResponse:
        engine = self._able(body.run)
        self._check_shapes(body)
        update = body.model_dump(include={"names", "dtype_names", "shapes"})
        await self._served.take_transfer(lambda: engine.receive_weights(update, body.version), body.run)
        return JSONResponse({"version": body.version})

    def _able(self, run: str | None) -> Any:
        self._served.claims.check_writer(run)
        if not transfer_ranks(self._served):
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
