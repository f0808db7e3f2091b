"""Rollout actors as one engine: the pool's rules (engine/_pool) over members that Ray started."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from podium.engine._pool.dispatch import Terms
from podium.engine._pool.health import Pulse
from podium.engine._pool.supervisor import Rules, Weights
from podium.engine._pool.together import (
    CLOSE_S,
    DEFAULT_CONCURRENCY,
    IDLE_S,
    TOLERANCE,
    Together,
)
from podium.errors import WeightsError
from podium.model.evidence import Held
from podium.records import Answer, Request, Sampling
from podium.runtime._ray.actors import Actors, Member
from podium.runtime._ray.calls import named
from podium.runtime._ray.limits import Limits

MAX_REDISPATCHES = 5
REQUEST_S = 3600.0


@dataclass(frozen=True)
class Shipment:
    """Weights on their way."""

    crate: Any
    """A reference to the crate (model/handoff.py) in the object store."""
    sha256: str
    """What a worker must say that it took."""


class RolloutMember(Member):
    """A worker of the pool, and its own engine."""

    def __init__(self, name: str, actor: Any, about: Mapping[str, Any], pool: "RolloutWorkers") -> None:
        super().__init__(name, actor, about)
        self.engine = self
        self.policy_version: int | None = None
        self._pool = pool

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Answer]:
        """Answers come through the object store, each as soon as it is whole; what nobody waits for is cancelled."""
        coming = self.actor.generate.options(num_returns="streaming").remote(list(requests), sampling)
        is_over = False
        try:
            with named(self.name):
                async for answer in coming:
                    yield await answer
            is_over = True
        finally:
            if not is_over:
                ray.cancel(coming)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        with named(self.name):
            return await self.actor.score.remote(list(token_ids))

    async def held(self) -> Held | None:
        with named(self.name):
            said = await self.actor.held.remote()
        return None if said is None else Held.from_json(said)

    async def load(self, folder: Shipment, version: int) -> None:
        """Confirmed by version and hash."""
        with named(self.name):
            held, sha256 = await self.actor.load.remote(folder.crate, version, self._pool.in_flight)
        if sha256 != folder.sha256:
            raise WeightsError(f"{self.name} confirmed other weights than version {version}")
        self.policy_version = held


class RolloutWorkers(Together):
    """Weights come by the object store: a worker may be on a machine that sees no folder of ours."""

    def __init__(
        self,
        actors: Actors,
        engine: str,
        dtype: str,
        replicas: tuple[int, int],
        prompts_per_request: int,
        limits: Limits,
        began: Callable[[], None],
    ) -> None:
        """`began` is called when the run begins, at its first push."""
        self._actors, self._began = actors, began
        waits = (limits.max_restarts, limits.start_s, limits.recovery_s, IDLE_S, TOLERANCE[dtype])
        rules = Rules(replicas, 1, *waits, name=actors.name, kind="rollout workers", floor_name="the fewest")
        is_exact = engine == "inprocess"
        terms = Terms(prompts_per_request, is_exact, MAX_REDISPATCHES, REQUEST_S, limits.recovery_s)
        super().__init__(dtype, rules, Pulse(limits.frozen_s, limits.stalled_s), terms, DEFAULT_CONCURRENCY[engine])

    async def load_shipment(self, shipment: Shipment, version: int) -> None:
        await self._thread.call(self._supervisor.push(Weights(shipment, version), self._begin))
        self.policy_version = version

    async def load_weights(self, weights: Iterable[Any], version: int) -> None:
        raise AssertionError("the trainer's actor gives its weights away as a crate")

    async def load_folder(self, folder: Path, version: int) -> None:
        raise AssertionError("workers see no folder of the driver's")

    def close(self) -> None:
        self._thread.finish(self._supervisor.close(), CLOSE_S)

    def _begin(self) -> None:
        self._began()
        self._supervisor.start(self._launch, [])

    async def _launch(self, name: str) -> RolloutMember:
        return RolloutMember(name, *await self._actors.take(name), self)
