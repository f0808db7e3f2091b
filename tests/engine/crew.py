"""A pool's inside on fake workers: what the tests of its rules work with."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from podium.engine._pool.dispatch import Dispatch, Terms
from podium.engine._pool.health import Pulse
from podium.engine._pool.members import Limit, Members
from podium.engine._pool.supervisor import Rules, Supervisor, Weights
from podium.errors import EngineError
from podium.records import Answer, Request, Sampling

RULES: dict[str, Any] = {
    "replicas": (2, 2),
    "floor": 1,
    "max_restarts": 2,
    "start_s": 5.0,
    "recovery_s": 5.0,
    "idle_s": 0.3,
    "tolerance": 1e-3,
}
TERMS: dict[str, Any] = {
    "prompts_per_request": 1,
    "in_order": False,
    "max_redispatches": 2,
    "request_s": 5.0,
    "busy_s": 1.0,
}


class FakeWorker:
    """Answers ids that are the seed; what goes wrong is set from outside."""

    def __init__(self, name: str) -> None:
        self.name, self.pid, self.engine = name, 1, self
        self.policy_version: int | None = None
        self.asked: list[list[int]] = []
        """Keys of each request."""
        self.has_ended = False
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.logprob = -1.0
        self.takes: Callable[[int], int | Exception] = lambda version: version
        """The version that a load leaves, or how it fails."""
        self.seconds = 0.0
        """A prompt takes so long."""
        self.fails: Callable[[], Exception | None] = lambda: None
        """Asked before each answer."""
        self.is_frozen = False
        self.loading = 0
        self.most_loading = 0

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Answer]:
        if sampling.max_new_tokens > 1:  # not a heartbeat
            self.asked.append([request.key for request in requests])
        for request in requests:
            await asyncio.sleep(self.seconds if not self.is_frozen else 1e6)
            if sampling.max_new_tokens > 1 and (failure := self.fails()):
                raise failure
            versions = ((self.policy_version or 0,) * 2,) * len(request.seeds)
            ids = tuple((seed,) for seed in request.seeds)
            yield Answer(request.key, ids, ((-0.5,),) * len(ids), ("stop",) * len(ids), versions)

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


class Crew:
    """`prepare` is given each worker before it is started, and may raise."""

    def __init__(
        self,
        prepare: Callable[[FakeWorker], None] = lambda worker: None,
        rules: dict[str, Any] | None = None,
        terms: dict[str, Any] | None = None,
        concurrency: int | None = 8,
        frozen_s: float = 0.3,
        stalled_s: float = 1.0,
    ) -> None:
        self.events: list[dict[str, Any]] = []
        self.workers: list[FakeWorker] = []
        self._prepare = prepare
        self.members = Members()
        rule = Rules(**(RULES | (rules or {})))
        pulse = Pulse(frozen_s, stalled_s)
        self.supervisor = Supervisor(self.members, rule, pulse, lambda: Limit(concurrency), self._note)
        self.dispatch = Dispatch(self.members, Terms(**(TERMS | (terms or {}))), self._note)

    async def __aenter__(self) -> "Crew":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.supervisor.close()

    async def push(self, version: int) -> None:
        begin = partial(self.supervisor.start, self._launch, [])
        await self.supervisor.push(Weights(Path(f"v{version}"), version), begin)

    async def generate(self, count: int, rollouts: int = 2) -> list[Answer]:
        return [answer async for answer in self.dispatch.generate(a_call(count, rollouts), Sampling())]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]

    async def until(self, holds: Callable[[], bool], limit_s: float = 10.0) -> None:
        async with asyncio.timeout(limit_s):
            while not holds():
                await asyncio.sleep(0.01)

    async def _launch(self, name: str) -> FakeWorker:
        worker = FakeWorker(name)
        self.workers.append(worker)
        self._prepare(worker)
        return worker

    def _note(self, kind: str, **details: Any) -> None:
        self.events.append({"event": kind, **details})


def a_call(count: int, rollouts: int = 2) -> list[Request]:
    return [Request(key, (1, 2), tuple(range(10 * key, 10 * key + rollouts))) for key in range(count)]


def crash(worker: FakeWorker) -> None:
    raise EngineError("cannot start")
