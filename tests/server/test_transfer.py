"""The server's side of weights from GPU to GPU, as far as a machine without GPUs goes: who is refused, and why.

The engine that takes them is a stand-in that notes what it is told: NCCL itself needs two GPUs.
"""

import asyncio
from dataclasses import replace
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch

from podium.records import EngineTraits
from podium.server.app import _Routes
from podium.server.door import Refusal
from podium.server.served import Claims, Gate, Served
from podium.server.wire import Join, Receive
from tests.server.serving import Running

SHAPES = {"a.weight": (2, 3), "b.weight": (4,)}
MEETING = {"master_address": "10.0.0.1", "master_port": 5000, "world_size": 3, "rank_offset": 1}
UPDATE = {"names": list(SHAPES), "dtype_names": ["float32"] * 2, "shapes": [list(s) for s in SHAPES.values()]}


class Able:
    """vLLM on two GPUs, as the server sees it."""

    traits = EngineTraits(channels=("nccl",), transfer_ranks=2)

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def join_transfer(self, init_info: dict[str, Any]) -> None:
        self.told.append(init_info)

    async def receive_weights(self, update_info: dict[str, Any], version: int) -> None:
        self.told.append((update_info, version))


def a_server(engine: Any, *, device: str = "cuda", peft: Any = None) -> Any:
    policy = SimpleNamespace(
        peft=peft,
        model=None,  # no experts, whose weights are kept in another form than a folder has them
        device=torch.device(device),
        named_weights=lambda: ((name, torch.zeros(shape)) for name, shape in SHAPES.items()),
    )
    server = SimpleNamespace(engine=engine, policy=policy, claims=Claims(), gate=Gate(), run=None)

    server._one_reload, server.failed = asyncio.Lock(), None
    server.take_transfer = MethodType(Served.take_transfer, server)
    return server


def routes(server: Any) -> _Routes:
    return _Routes(server, "vllm_local", print)


def test_names_and_shapes_reach_the_engine_and_the_run_owns_the_weights() -> None:
    engine = Able()
    server = a_server(engine)
    server.claims.take("mine", "run")
    asyncio.run(routes(server).join_transfer(Join(**MEETING, run="mine")))  # type: ignore[arg-type]
    asyncio.run(routes(server).receive_weights(Receive(**UPDATE, version=7, run="mine")))  # type: ignore[arg-type]
    assert engine.told == [MEETING, (UPDATE, 7)]
    assert server.run == "mine"


@pytest.mark.parametrize("change", [{"names": ["a.weight", "c.weight"]}, {"shapes": [[2, 3], [5]]}, {"names": ["a"]}])
def test_tensors_of_another_model_are_refused_before_any_comes(change: dict[str, Any]) -> None:
    engine = Able()
    with pytest.raises(Refusal, match="tensor"):
        asyncio.run(routes(a_server(engine)).receive_weights(Receive(**(UPDATE | change), version=7)))  # type: ignore[arg-type]
    assert engine.told == []


def test_an_engine_that_cannot_receive_takes_none() -> None:
    engine = Able()
    engine.traits = replace(engine.traits, transfer_ranks=0)
    with pytest.raises(Refusal, match="no weights by NCCL"):
        asyncio.run(routes(a_server(engine)).join_transfer(Join(**MEETING)))  # type: ignore[arg-type]


def test_another_run_than_the_owner_is_refused() -> None:
    server = a_server(Able())
    server.claims.take("mine", "run")
    with pytest.raises(Refusal, match="mine"):
        asyncio.run(routes(server).join_transfer(Join(**MEETING, run="other")))  # type: ignore[arg-type]


def test_a_real_server_without_a_gpu_says_so(server: Running) -> None:
    with server.client() as client:
        assert client.get("/info").json()["transfer_ranks"] == 0
        for route, body in (("/join_transfer", MEETING), ("/receive_weights", {**UPDATE, "version": 1})):
            answer = client.post(route, json=body)
            assert answer.status_code == 422
            assert "no weights by NCCL" in answer.json()["error"]


def test_after_a_transfer_that_broke_off_nothing_is_served() -> None:
    class Breaking(Able):
        async def receive_weights(self, update_info: dict[str, Any], version: int) -> None:
            raise RuntimeError("the other side is gone")

    server = a_server(Breaking())
    with pytest.raises(RuntimeError, match="gone"):
        asyncio.run(routes(server).receive_weights(Receive(**UPDATE, version=7)))  # type: ignore[arg-type]
    assert "broke off" in server.failed
