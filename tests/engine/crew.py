"""A pool's inside on fake workers: what the tests of its rules work with."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from podium.errors import EngineError
from podium.records import Answer, PrefixGroup, Request, Sampling
from podium.remote.engine_pool import EngineMember, EnginePool, Weights
from podium.remote.pool import Rules

RULES: dict[str, Any] = {
    "replicas": (2, 2),
    "floor": 1,
    "max_restarts": 2,
    "start_s": 5.0,
    "recovery_s": 5.0,
    "idle_s": 0.3,
    "max_redispatches": 2,
    "request_s": 5.0,
    "kind": "engines",
    "error": EngineError,
}


class FakeWorker:
    """Answers ids that are the seed; what goes wrong is set from outside."""

    def __init__(self, name: str) -> None:
        self.name, self.pid, self.engine = name, 1, self
        self.policy_version: int | None = None
        self.asked: list[int] = []
        """The seed of each request."""
        self.has_ended = False
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.logprob = -1.0
        self.takes: Callable[[int], int | Exception] = lambda version: version
        """The version that a load leaves, or how it fails."""
        self.seconds = 0.0
        """A rollout takes so long."""
        self.fails: Callable[[], Exception | None] = lambda: None
        """Asked before each answer."""
        self.is_frozen = False
        self.loading = 0
        self.most_loading = 0

    async def generate(self, request: Request) -> Answer:
        is_heartbeat = request.sampling.max_new_tokens == 1
        if not is_heartbeat:
            self.asked.append(request.seed)
        await asyncio.sleep(self.seconds if not self.is_frozen else 1e6)
        if not is_heartbeat and (failure := self.fails()):
            raise failure
        return Answer((request.seed,), (-0.5,), "stop", (self.policy_version or 0,) * 2)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return [self.logprob] * (len(token_ids) - 1)

    async def load(self, folder: Path, version: int) -> None:
        self.loading += 1
        self.most_loading = max(self.most_loading, self.loading)
        await asyncio.sleep(0.01)
        self.loading -= 1
        taken = self.takes(version)
        if isinstance(taken, Exception):
            raise taken
        self.policy_version = taken

    async def ping(self) -> None:
        if self.is_frozen:
            await asyncio.sleep(1e6)

    async def exited(self) -> str:
        return await asyncio.shield(self.death)

    async def end(self) -> None:
        self.has_ended = True
        if not self.death.done():
            self.death.set_result("ended")

    def die(self) -> None:
        self.death.set_result("its process was killed by SIGKILL")


class FakePool(EnginePool):
    """Of fake workers, in the event loop of its caller; `prepare` is given each worker before it serves."""

    def __init__(self, prepare: Callable[[FakeWorker], None], *settings: Any) -> None:
        super().__init__(*settings)
        self._thread._loop = asyncio.get_running_loop()
        self.workers: list[FakeWorker] = []
        self.prepare, self.pool = prepare, self._pool

    async def push(self, version: int) -> None:
        await self._thread.call(self._push(Weights(Path(f"v{version}"), version)))

    def _start(self) -> None:
        self._pool.start(self._launch)

    async def _launch(self, name: str) -> FakeWorker:
        worker = FakeWorker(name)
        self.workers.append(worker)
        self.prepare(worker)
        return worker


class Crew:
    """`prepare` is given each worker before it is started, and may raise. `keeps_order`: of the members, for the rules
    that depend on it."""

    def __init__(
        self,
        prepare: Callable[[FakeWorker], None] = lambda worker: None,
        rules: dict[str, Any] | None = None,
        concurrency: int | None = 8,
        frozen_s: float = 0.3,
        stalled_s: float = 1.0,
        keeps_order: bool = False,
    ) -> None:
        self.events: list[dict[str, Any]] = []
        rule = Rules(frozen_s=frozen_s, **(RULES | (rules or {})))
        traits = replace(EnginePool.traits, keeps_order=keeps_order)
        self.engine = FakePool(prepare, rule, traits, concurrency, stalled_s, self._note)
        self.workers, self.pool = self.engine.workers, self.engine.pool

    @property
    def members(self) -> list[EngineMember]:
        return self.pool.members

    async def __aenter__(self) -> "Crew":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.pool.close()

    async def push(self, version: int) -> None:
        await self.engine.push(version)

    async def generate(self, count: int, rollouts: int = 2) -> list[Answer]:
        return await asyncio.gather(*(self.engine.generate(request) for request in a_step(count, rollouts)))

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    async def until(self, holds: Callable[[], bool], limit_s: float = 10.0) -> None:
        async with asyncio.timeout(limit_s):
            while not holds():
                await asyncio.sleep(0.01)

    def _note(self, kind: str, **details: Any) -> None:
        self.events.append({"event": kind, **details})


def a_step(count: int, rollouts: int = 2) -> list[Request]:
    """The requests of so many prompts. Rollout k of prompt p has seed 10 p + k."""
    return [
        Request((1, 2), Sampling(), 10 * prompt + k, PrefixGroup(f"train/{prompt}", rollouts))
        for prompt in range(count)
        for k in range(rollouts)
    ]


def seeds(count: int, rollouts: int = 2) -> list[int]:
    return [request.seed for request in a_step(count, rollouts)]


def crash(worker: FakeWorker) -> None:
    raise EngineError("cannot start")
