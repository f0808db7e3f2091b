"""The trainer and a separate reference in actors, and the driver's ends of both.

    TrainerActor, one per rank: a HostedTrainer (wiring/trainer.py)       ◄── RemoteTrainer, in the driver
    ReferenceActor: a FrozenReference (wiring/reference.py)               ◄── RemoteReference

Weights go from the trainer's actor to the rollout actors through the object store and not through the driver. If one of
the actors dies, the run ends with an error and can be resumed from its last commit.
"""

import asyncio
import os
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from podium.errors import ReferenceLostError, TrainerLostError
from podium.model.chat import tokenizer_fingerprint
from podium.model.evidence import Held
from podium.model.handoff import Files, PackedFolder, pack_published, read_files, write_files
from podium.records import Batch, UpdateResult
from podium.runtime.on_ray.calls import Handle, RunActor, named
from podium.runtime.on_ray.rollouts import Shipment
from podium.runtime.ranks.launch import START_LIMIT
from podium.runtime.ranks.line import follow, join
from podium.runtime.wiring.memory import MemoryPlan
from podium.runtime.wiring.reference import ANSWER_S, FrozenReference
from podium.runtime.wiring.trainer import HostedTrainer
from podium.settings.tables import Settings
from podium.sync._delivery import Delivery
from podium.sync.nccl import free_port
from podium.trainer.build import check_trainer

CALL_S = 3600.0
"""For a call that the driver waits for without a watchdog."""


@dataclass(frozen=True)
class About:
    """What the driver needs to know of the trainer's process and policy."""

    pid: int
    node: str
    stop_ids: tuple[int, ...]
    max_context_tokens: int
    vocabulary: int
    tokenizer: Mapping[str, Any]
    """Its fingerprint."""
    base_digest: str | None
    """Of the weights under the adapter; taken by rank 0 only, with which the other ranks are compared."""


class TrainerActor(RunActor):
    _host: HostedTrainer

    def open(self, settings: Settings, ranks: int, rank: int) -> None:
        self._settings, self._rank, self._ranks = settings, rank, ranks
        self._crate: PackedFolder | None = None
        """Published weights that nobody has fetched yet."""

    async def meeting_place(self) -> tuple[str, int]:
        """Address and port on the machine of rank 0 where the ranks meet."""
        from ray.util import get_node_ip_address

        return get_node_ip_address(), free_port(get_node_ip_address())

    async def load(self, meet_at: tuple[str, int] | None = None) -> About:
        if meet_at is not None:
            await asyncio.to_thread(self._join, *meet_at)
        return await asyncio.to_thread(self._load)

    async def build(self, steps: int, longest_prompt: int) -> MemoryPlan:
        """`steps` of the whole run; `longest_prompt` of its data, in tokens."""

        def build() -> MemoryPlan:
            memory = self._host.plan_memory(longest_prompt)
            self._host.build(steps, join() if self._ranks > 1 else None)  # every rank joins at this point
            return memory

        return await asyncio.to_thread(build)

    async def follow(self) -> None:
        """What every rank but 0 does from then on. A rank that fails ends its process, so that the others notice."""
        try:
            await asyncio.to_thread(follow, join(), self._host.trainer, None)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    async def step(self, batches: list[Batch]) -> UpdateResult:
        return await self._host.trainer.step(batches)

    async def score(self, token_ids: list[int]) -> list[float]:
        return await self._host.trainer.score(token_ids)

    async def difference(self, held: Held) -> str | None:
        return await self._host.difference(held)

    async def publish(self, version: int) -> str:
        """The hash of the weights, which `crate` then gives away. Weights that are not finite are not published."""
        await self._host.check_finite(f"before the push of policy version {version}")
        self._crate = await asyncio.to_thread(self._publish, version)
        return self._crate.sha256

    async def crate(self) -> PackedFolder:
        """The weights that were published last. The driver passes them on without opening them."""
        crate, self._crate = self._crate, None
        assert crate is not None
        return crate

    async def state(self) -> Mapping[str, torch.Tensor]:
        return await asyncio.to_thread(self._host.trainer.state)

    async def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        await asyncio.to_thread(self._host.trainer.load_state, tensors)

    async def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        await asyncio.to_thread(self._host.trainer.load_weights, tensors)

    async def load_start(self) -> None:
        await asyncio.to_thread(self._host.load_start)

    async def save_model(self) -> Files:
        def save() -> Files:
            with tempfile.TemporaryDirectory(prefix="podium-model-") as folder:
                self._host.trainer.save_model(folder)
                return read_files(Path(folder))

        return await asyncio.to_thread(save)

    def _join(self, address: str, port: int) -> None:
        import torch.distributed as dist

        ranks = {"RANK": self._rank, "WORLD_SIZE": self._ranks, "LOCAL_RANK": 0, "MASTER_PORT": port}
        os.environ |= {key: str(value) for key, value in ranks.items()} | {"MASTER_ADDR": address}
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=START_LIMIT)

    def _load(self) -> About:
        check_trainer(self._settings)
        self._host = HostedTrainer(self._settings)
        policy = self._host.policy
        fingerprint = tokenizer_fingerprint(policy.tokenizer)
        base_digest = policy.base_digest() if self._rank == 0 else None
        facts = (policy.stop_ids, policy.max_context_tokens, policy.vocabulary, fingerprint, base_digest)
        return About(os.getpid(), os.uname().nodename, *facts)

    def _publish(self, version: int) -> PackedFolder:
        with tempfile.TemporaryDirectory(prefix="podium-weights-") as root:
            return pack_published(self._host.publish(Path(root), version))


@dataclass(frozen=True)
class RemotePolicy:
    """What the driver knows of a policy whose weights are in the trainer's actor."""

    tokenizer: Any
    stop_ids: tuple[int, ...]
    max_context_tokens: int
    vocabulary: int
    base_digest: str | None
    """Of the weights under the adapter; None for full weights."""


class RemoteTrainer:
    """The driver's end of the trainer's actor: the trainer that the loop and the checkpoint know."""

    def __init__(self, actor: Handle) -> None:
        self._actor = actor

    async def step(self, batches: Sequence[Batch]) -> UpdateResult:
        return await self._call("step", batches)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await self._call("score", list(token_ids))

    async def difference(self, held: Held) -> str | None:
        return await self._call("difference", held)

    async def ship(self, version: int) -> Shipment:
        """The weights as they are now; they stay in the object store."""
        sha256 = await self._call("publish", version)
        return Shipment(self._actor.call("crate"), sha256)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("weights go to the workers as a crate")

    def state(self) -> Mapping[str, torch.Tensor]:
        return self._wait("state")

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._wait("load_state", tensors)

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._wait("load_weights", tensors)

    def load_start(self) -> None:
        self._wait("load_start")

    def save_model(self, folder: str) -> None:
        write_files(self._wait("save_model"), Path(folder))

    async def _call(self, name: str, *arguments: Any) -> Any:
        with named("the trainer's actor", TrainerLostError):
            return await self._actor.call(name, *arguments)

    def _wait(self, name: str, *arguments: Any) -> Any:
        with named("the trainer's actor", TrainerLostError):
            return self._actor.call(name, *arguments).result(CALL_S)


class StoreDelivery(Delivery):
    """Weights go from the trainer's actor to the workers through the object store."""

    async def check_weights(self, version: int) -> None:
        """The actor checks the weights before it publishes them."""

    async def difference(self, held: Held) -> str | None:
        """The actor compares, since it holds the trainer's weights."""
        trainer: Any = self.trainer
        return await trainer.difference(held)

    async def by_folder(self, root: Path | None, version: int) -> None:
        trainer: Any = self.trainer
        engine: Any = self.engine
        await engine.load_shipment(await trainer.ship(version), version)


class ReferenceActor(RunActor):
    def open(self, model: Mapping[str, Any], precision: str, seed: int) -> None:
        self._needs = model, precision, seed

    async def load(self) -> dict[str, Any]:
        self._reference = await asyncio.to_thread(FrozenReference, *self._needs)
        return self.about()

    async def logprobs(self, batch: Batch) -> torch.Tensor:
        return await asyncio.to_thread(self._reference.logprobs, batch)


class RemoteReference:
    """The driver's end of the reference's actor."""

    def __init__(self, actor: Handle) -> None:
        self._actor = actor

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """`[T]` at the batch's temperature."""
        with named("the reference's actor", ReferenceLostError):
            return self._actor.call("logprobs", batch).result(ANSWER_S)
