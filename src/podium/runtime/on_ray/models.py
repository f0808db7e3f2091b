"""The actors that hold a model, and the driver's ends of them: rollout workers, the trainer, a separate reference.

    RolloutActor: an engine as `podium serve` serves it              ◄── RolloutWorker, in the pool RolloutWorkers
    TrainerActor, one per rank: a HostedTrainer (wiring/trainer.py)  ◄── RemoteTrainer
    ReferenceActor: a FrozenReference (wiring/trainer.py)            ◄── RemoteReference

Weights go from the trainer's actor to the rollout actors through the object store and not through the driver: a worker
may run on a machine that cannot read the driver's folders. A lost rollout worker is replaced. If another of these
actors dies, the run ends with an error and can be resumed from its last commit.
"""

import asyncio
import os
import tempfile
import traceback
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ray.util import get_node_ip_address

from podium.engine.pool import PoolFolder
from podium.errors import BusyError, EngineError, ReferenceLostError, TrainerLostError, WeightsError
from podium.model.chat import tokenizer_fingerprint
from podium.model.evidence import Held
from podium.model.handoff import (
    Files,
    PackedFolder,
    pack_published,
    read_files,
    remove_published,
    unpack_published,
    write_files,
)
from podium.records import Answer, Batch, Request, UpdateResult
from podium.remote.engine_pool import CLOSE_S, DEFAULT_CONCURRENCY, EnginePool, Weights
from podium.remote.pool import OnEvent, Rules
from podium.remote.rollouts import Batching
from podium.runtime.on_ray.actors import ActorGroup, Call, Handle, RunActor
from podium.runtime.ranks import follow, join
from podium.runtime.ranks.launch import meet
from podium.runtime.wiring.memory import MemoryPlan
from podium.runtime.wiring.trainer import ANSWER_S, FrozenReference, HostedTrainer
from podium.server.door import Refusal
from podium.server.serve import load_engine, make_served
from podium.settings.tables import Settings
from podium.sync import Delivery
from podium.sync.nccl import free_port
from podium.trainer.build import check_trainer

CALL_S = 3600.0
"""For a call that the driver waits for without a watchdog."""
REFUSALS = {503: BusyError, 403: WeightsError, 404: WeightsError, 422: WeightsError}
"""What a server would answer with one of these statuses is an error of its kind here; else an `EngineError`."""


class RolloutActor(RunActor):
    """`given` says which model and engine (server/serve.py)."""

    def open(self, given: Mapping[str, Any]) -> None:
        self._given, self._folder = dict(given), PoolFolder()
        self._served: Any = None

    async def start(self) -> dict[str, Any]:
        """Loads, the first time; then, and whenever a driver comes back, says what it has."""
        if self._served is None:
            with self.loading():
                policy, engine = await asyncio.to_thread(load_engine, self._given)
                served = make_served(policy, engine, self._folder.weights)
                await served.start()
            self._served = served
        policy, engine = self._served.policy, self._served.engine
        return self.about() | {
            "given": self._given,
            "tokenizer": tokenizer_fingerprint(policy.tokenizer),
            "dtype": engine.traits.dtype,
            "keeps_order": engine.traits.keeps_order,
        }

    async def generate(self, requests: list[Request]) -> AsyncIterator[tuple[int, Answer]]:
        """Each answer with the place of its request."""
        with _refusals_named():
            async with aclosing(self._served.answers(requests)) as answers:
                async for written in answers:
                    if written is not None:
                        yield written.place, written.answer

    async def score(self, token_ids: list[int]) -> list[float]:
        with _refusals_named():
            return (await self._served.score(token_ids))["logprobs"]

    async def held(self) -> Held | None:
        """Checksums of what it samples with."""
        with _refusals_named():
            return (await self._served.held())["held"]

    async def load(self, crate: PackedFolder, version: int) -> tuple[int, str]:
        """The version that it holds now, and the hash of its weights."""
        folder = await asyncio.to_thread(unpack_published, crate, self._folder.weights)
        try:
            with _refusals_named():
                sha256 = await self._served.reload(folder.name, version, self._given["in_flight"], None)
        finally:
            await asyncio.to_thread(remove_published, folder)
        return self._served.version, sha256


@contextmanager
def _refusals_named() -> Iterator[None]:
    try:
        yield
    except Refusal as refusal:
        raise REFUSALS.get(refusal.status, EngineError)(refusal.message) from None


@dataclass(frozen=True)
class Shipment:
    """Weights on their way."""

    crate: Call
    """The crate (model/handoff.py) in the object store."""
    sha256: str
    """What a worker must confirm."""


@dataclass(eq=False)
class RolloutWorker(Handle):
    """A worker of the pool, and its own engine. Each answer comes as soon as it is whole."""

    kind = RolloutActor
    policy_version: int | None = None

    def __post_init__(self) -> None:
        self.engine, self.generate = self, Batching(partial(self.stream, "generate")).generate

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await self.call("score", token_ids)

    async def held(self) -> Held | None:
        return await self.call("held")

    async def load(self, shipment: Shipment, version: int) -> None:
        """Confirmed by version and hash."""
        held, sha256 = await self.call("load", shipment.crate, version)
        if sha256 != shipment.sha256:
            raise WeightsError(f"{self.name} confirmed other weights than version {version}")
        self.policy_version = held


class RolloutWorkers(EnginePool):
    """All rollout workers as one engine (remote/engine_pool.py)."""

    def __init__(self, settings: Settings, actors: ActorGroup, rules: Rules, on_event: OnEvent) -> None:
        self._actors = actors
        rules = replace(rules, name=actors.name, kind="rollout workers", error=EngineError)
        plan, stalled_s = settings.plan, settings.runtime.options["stalled_s"]
        share = -(-plan.prompts_ahead // rules.replicas[1])  # a worker's prompts of those that are written at a time
        concurrency = max(DEFAULT_CONCURRENCY, share * plan.rollouts_per_prompt)
        traits = replace(
            type(self).traits,
            dtype="bfloat16" if any(actor.about["dtype"] == "bfloat16" for actor in actors.ready) else "float32",
            keeps_order=all(actor.about["keeps_order"] for actor in actors.ready),
        )
        super().__init__(rules, traits, concurrency, stalled_s, on_event, share)

    async def load_shipment(self, shipment: Shipment, version: int) -> None:
        await self._thread.call(self._push(Weights(shipment, version)))
        self.policy_version = version

    def close(self) -> None:
        self._thread.finish(self._pool.close(), CLOSE_S)

    def _start(self) -> None:
        self._pool.start(self._actors.take)


@dataclass(frozen=True)
class RemotePolicy:
    """What the driver knows of the policy, whose weights are in the trainer's actor."""

    tokenizer: Any
    stop_ids: tuple[int, ...]
    max_context_tokens: int
    vocabulary: int


class TrainerActor(RunActor, HostedTrainer):
    """The trainer of one rank. The driver calls rank 0."""

    def open(self, settings: Settings, ranks: int) -> None:
        self.settings, self._ranks = settings, ranks
        self._crate: PackedFolder | None = None
        """Published weights that nobody has fetched yet."""

    def meeting_place(self) -> tuple[str, int]:
        """Address and port on the machine of rank 0 where the ranks meet."""
        return get_node_ip_address(), free_port(get_node_ip_address())

    def start(self, rank: int, meet_at: tuple[str, int] | None) -> dict[str, Any]:
        """Loads; then says what the driver needs to know of the policy."""
        if meet_at is not None:
            address, port = meet_at
            ranks = {"RANK": rank, "WORLD_SIZE": self._ranks, "LOCAL_RANK": 0, "MASTER_PORT": port}
            os.environ |= {key: str(value) for key, value in ranks.items()} | {"MASTER_ADDR": address}
            meet()
        check_trainer(self.settings)
        HostedTrainer.__init__(self, self.settings)
        return self.about() | {
            "tokenizer": tokenizer_fingerprint(self.policy.tokenizer),
            "stop_ids": list(self.policy.stop_ids),
            "max_context_tokens": self.policy.max_context_tokens,
            "vocabulary": self.policy.vocabulary,
        }

    def prepare(self, steps: int, longest_prompt: int) -> tuple[MemoryPlan, str | None]:
        """The memory plan and the digest of the base weights. `steps` of the whole run; `longest_prompt` in tokens."""
        self.build(steps, longest_prompt, join() if self._ranks > 1 else None)  # every rank joins at this point
        return self.memory, self.base_digest

    def follow(self) -> None:
        """What every rank but 0 does from then on. A rank that fails ends its process, so that the others notice."""
        try:
            follow(join(), self.trainer, None)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    async def step(self, batches: list[Batch]) -> UpdateResult:
        return await self.trainer.step(batches)

    async def score(self, token_ids: list[int]) -> list[float]:
        return await self.trainer.score(token_ids)

    async def pack(self, version: int) -> str:
        """The hash of the published weights, which `crate` then gives away. They must be finite."""
        await self.check_finite(f"before the push of policy version {version}")
        with tempfile.TemporaryDirectory(prefix="podium-weights-") as root:
            self._crate = await asyncio.to_thread(lambda: pack_published(self.publish(Path(root), version)))
        return self._crate.sha256

    def crate(self) -> PackedFolder:
        """The weights that were published last. The driver passes them on without opening them."""
        crate, self._crate = self._crate, None
        assert crate is not None
        return crate

    def state(self) -> Mapping[str, torch.Tensor]:
        return self.trainer.state()

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.trainer.load_state(tensors)

    def save_model(self) -> Files:
        with tempfile.TemporaryDirectory(prefix="podium-model-") as folder:
            self.trainer.save_model(folder)
            return read_files(Path(folder))


@dataclass(eq=False)
class RemoteTrainer(Handle):
    """The driver's end of the trainer's actor: the trainer that loop and checkpoint know. It never holds weights."""

    kind, lost = TrainerActor, TrainerLostError
    name: str = "the trainer's actor"

    async def step(self, batches: Sequence[Batch]) -> UpdateResult:
        return await self.call("step", batches)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await self.call("score", token_ids)

    async def difference(self, held: Held) -> str | None:
        return await self.call("difference", held)

    async def ship(self, version: int) -> Shipment:
        """The weights as they are now; they stay in the object store."""
        sha256 = await self.call("pack", version)
        return Shipment(self.call("crate"), sha256)

    def state(self) -> Mapping[str, torch.Tensor]:
        return self.call("state").result(CALL_S)

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.call("load_state", tensors).result(CALL_S)

    def load_start(self) -> None:
        self.call("load_start").result(CALL_S)

    def save_model(self, folder: str) -> None:
        write_files(self.call("save_model").result(CALL_S), Path(folder))


class StoreDelivery(Delivery):
    """Weights go from the trainer's actor to the workers through the object store. The actor, which holds the trainer's
    weights, checks them before it publishes them, and compares them with what engines show."""

    trainer: Any
    engine: Any

    async def check_weights(self, version: int) -> None:
        """In the trainer's actor."""

    async def difference(self, held: Held) -> str | None:
        return await self.trainer.difference(held)

    async def by_folder(self, root: Path | None, version: int) -> None:
        await self.engine.load_shipment(await self.trainer.ship(version), version)


class ReferenceActor(RunActor, FrozenReference):
    def open(self, model: Mapping[str, Any], precision: str | None, seed: int) -> None:
        self._needs = model, precision, seed

    def start(self) -> dict[str, Any]:
        FrozenReference.__init__(self, *self._needs)
        return self.about()


@dataclass(eq=False)
class RemoteReference(Handle):
    """The driver's end of the reference's actor."""

    kind, lost = ReferenceActor, ReferenceLostError
    name: str = "the reference's actor"

    def logprobs(self, batch: Batch) -> torch.Tensor:
        return self.call("logprobs", batch).result(ANSWER_S)
