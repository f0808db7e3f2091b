"""A rollout worker: an engine as `podium serve` serves it, called through Ray instead of HTTP."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

from podium.engine.pool import PoolFolder
from podium.errors import BusyError, EngineError, WeightsError
from podium.model.chat import tokenizer_fingerprint
from podium.model.evidence import Held
from podium.model.handoff import PackedFolder, remove_published, unpack_published
from podium.records import Answer, Request
from podium.runtime.on_ray.calls import RunActor
from podium.server.door import Refusal
from podium.server.serve import load_engine, make_served


class RolloutActor(RunActor):
    """`given` says which model and engine (server/serve.py)."""

    def open(self, given: Mapping[str, Any]) -> None:
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
            "dtype": engine.traits.dtype,
            "keeps_order": engine.traits.keeps_order,
        }

    def _load(self) -> Any:
        self._folder = PoolFolder()
        policy, engine = load_engine(self._given)
        return make_served(policy, engine, self._folder.weights)

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

    async def load(self, crate: PackedFolder, version: int, in_flight: bool) -> tuple[int, str]:
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
