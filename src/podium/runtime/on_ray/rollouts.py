"""Rollout actors as one engine (remote/engine_pool.py): Ray starts the members, and weights reach them through
the object store, since a worker may run on a machine that cannot read the driver's folders."""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from podium.errors import EngineError, WeightsError
from podium.model.evidence import Held
from podium.records import Answer, Request
from podium.remote.engine_pool import CLOSE_S, EnginePool, Weights
from podium.remote.pool import OnEvent, Rules
from podium.remote.rollouts import Batching
from podium.runtime.on_ray.actors import ActorGroup, ActorWorker
from podium.runtime.on_ray.calls import Call, Handle, named
from podium.stages import OnTokens


@dataclass(frozen=True)
class Shipment:
    """Weights on their way."""

    crate: Call
    """The crate (model/handoff.py) in the object store."""
    sha256: str
    """What a worker must confirm."""


class RolloutWorker(ActorWorker):
    """A worker of the pool, and its own engine."""

    def __init__(self, name: str, actor: Handle, about: Mapping[str, Any], pool: "RolloutWorkers") -> None:
        super().__init__(name, actor, about)
        self.engine = self
        self.policy_version: int | None = None
        self._pool, self._batching = pool, Batching(self._ask)

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Answer:
        return await self._batching.generate(request, on_tokens)

    async def _ask(self, requests: list[Request]) -> AsyncGenerator[tuple[int, Answer]]:
        """Answers come through the object store, each as soon as it is whole; closing the iterator cancels the rest."""
        with named(self.name):
            async with aclosing(self.actor.stream("generate", requests)) as answers:
                async for answer in answers:
                    yield answer

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        with named(self.name):
            return await self.actor.call("score", list(token_ids))

    async def held(self) -> Held | None:
        with named(self.name):
            return await self.actor.call("held")

    async def load(self, shipment: Shipment, version: int) -> None:
        """Confirmed by version and hash."""
        with named(self.name):
            held, sha256 = await self.actor.call("load", shipment.crate, version, self._pool.in_flight)
        if sha256 != shipment.sha256:
            raise WeightsError(f"{self.name} confirmed other weights than version {version}")
        self.policy_version = held


class RolloutWorkers(EnginePool):
    policy_version: int | None

    def __init__(
        self,
        actors: ActorGroup,
        concurrency: int,
        share: int,
        rules: Rules,
        stalled_s: float,
        began: Callable[[], None],
        in_flight: bool,
        on_event: OnEvent,
    ) -> None:
        """`concurrency`: rollouts in flight per worker; `share`: prompts that a worker on a CPU writes at a time.
        `began` is called when the run begins, at its first push."""
        self._actors, self._began, self.in_flight = actors, began, in_flight
        rules = replace(rules, name=actors.name, kind="rollout workers", error=EngineError)
        said = [about for _, about in actors.ready]
        is_coarse = any(about["dtype"] == "bfloat16" for about in said)
        traits = replace(
            type(self).traits,
            dtype="bfloat16" if is_coarse else "float32",
            keeps_order=all(about["keeps_order"] for about in said),
        )
        super().__init__(rules, traits, concurrency, stalled_s, on_event, share)

    async def load_shipment(self, shipment: Shipment, version: int) -> None:
        await self._thread.call(self._push(Weights(shipment, version)))
        self.policy_version = version

    async def load_weights(self, weights: Iterable[Any], version: int) -> None:
        raise AssertionError("the trainer's actor gives its weights away as a crate")

    async def load_folder(self, folder: Path, version: int) -> None:
        raise AssertionError("workers see no folder of the driver's")

    def close(self) -> None:
        self._thread.finish(self._pool.close(), CLOSE_S)

    def _start(self) -> None:
        self._began()
        self._pool.start(self._launch)

    async def _launch(self, name: str) -> RolloutWorker:
        return RolloutWorker(name, *await self._actors.take(name), self)
