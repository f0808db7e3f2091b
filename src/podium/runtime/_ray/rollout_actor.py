"""A rollout worker: an engine as `podium serve` serves it, called through Ray instead of HTTP."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from podium.engine._pool.keeper import PoolFolder
from podium.errors import BusyError, EngineError, WeightsError
from podium.model.fingerprint import tokenizer_fingerprint
from podium.model.handoff import Crate, remove_published, unpack_published
from podium.records import Answer, Request, Sampling
from podium.runtime._keeper import load_engine, make_served
from podium.runtime._ray.tenant import Place, Tenant
from podium.server.refusal import Refusal


class RolloutActor(Tenant):
    """`given` says which model and engine (runtime/_keeper.py)."""

    def __init__(self, place: Place, given: Mapping[str, Any]) -> None:
        super().__init__(place)
        self._given = dict(given)
        self._served: Any = None
        self._folder: PoolFolder | None = None

    async def start(self) -> dict[str, Any]:
        """Loads, the first time; then, and whenever a driver comes back, says what it has."""
        if self._served is None:
            with self.loading():
                served = await asyncio.to_thread(self._load)
                await served.start()
            self._served = served
        policy, engine = self._served.policy, self._served.engine
        return self.about() | {
            "given": self._given,
            "vocabulary": policy.vocabulary,
            "tokenizer": tokenizer_fingerprint(policy.tokenizer),
            "dtype": getattr(engine, "dtype", str(policy.model.dtype).removeprefix("torch.")),
        }

    def _load(self) -> Any:
        self._folder = PoolFolder()
        policy, engine = load_engine(self._given)
        return make_served(policy, engine, self._folder.weights)

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Answer]:
        with _refusals_named():
            async with aclosing(self._served.answers(requests, sampling)) as answers:
                async for item in answers:
                    if item is not None:
                        yield item[0]

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        with _refusals_named():
            return (await self._served.score(token_ids))["logprobs"]

    async def held(self) -> dict[str, Any] | None:
        """Checksums of what it samples with."""
        with _refusals_named():
            return (await self._served.held())["held"]

    async def load(self, crate: Crate, version: int, in_flight: bool) -> tuple[int, str]:
        """The version that it holds now, and the hash of its weights."""
        assert self._folder is not None
        folder = await asyncio.to_thread(unpack_published, crate, self._folder.weights)
        try:
            with _refusals_named():
                sha256 = await self._served.reload(folder.name, version, in_flight, None)
        finally:
            await asyncio.to_thread(remove_published, folder)
        return self._served.version, sha256


@contextmanager
def _refusals_named() -> Any:
    """What a server would answer with a status is an error of its kind here."""
    try:
        yield
    except Refusal as refusal:
        kind = {503: BusyError, 403: WeightsError, 404: WeightsError, 422: WeightsError}.get(
            refusal.status, EngineError
        )
        raise kind(refusal.message) from None
