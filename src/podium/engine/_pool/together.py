"""Many engines as one, whoever starts them: requests in, answers out, and every member is asked to prove a push."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from typing import Any

from podium.engine._pool.dispatch import Dispatch, Terms
from podium.engine._pool.health import Pulse
from podium.engine._pool.members import Limit, Members, OnEvent
from podium.engine._pool.supervisor import Rules, Supervisor
from podium.engine._pool.thread import PoolThread
from podium.errors import EngineError
from podium.model.agreement import allowed_gap, mean_gap
from podium.model.evidence import Held
from podium.records import Answer, Request, Sampling

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
"""Of a new member's logprobs from those of the others, on average."""
DEFAULT_CONCURRENCY = {"inprocess": 64, "vllm_local": 256, None: 256}
"""Rollouts in flight per member, by the engine in it."""
PROMPTS_PER_REQUEST = {"inprocess": 4, "vllm_local": 1, None: 1}
"""In-process engines write the prompts of a request in one batch."""
IDLE_S = 60.0
CLOSE_S = 60.0


class Together:
    """Whoever is made of it starts the members (`_supervisor.push`) and ends what they ran in."""

    def __init__(self, dtype: str, rules: Rules, pulse: Pulse, terms: Terms, concurrency: int | None) -> None:
        """`concurrency` None: found out by each member."""
        self.policy_version: int | None = None
        self.on_event: OnEvent = lambda kind, **details: None
        """Told what happens to members; a run writes it to its event log."""
        self.in_flight = False
        """Whether members take new weights in the middle of answers; a schedule sets it before the first push."""
        self.dtype = dtype
        self._members, self._thread = Members(), PoolThread()
        self._dispatch = Dispatch(self._members, terms, self._tell)
        self._supervisor = Supervisor(self._members, rules, pulse, lambda: Limit(concurrency), self._tell)

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Answer]:
        async with aclosing(self._thread.stream(self._dispatch.generate(requests, sampling))) as answers:
            async for answer in answers:
                yield answer

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """By every member; they must agree."""
        scores = await self.score_each(token_ids)
        first, *others = scores
        for name in others:
            gap = mean_gap(scores[first], scores[name])
            if not gap <= allowed_gap(TOLERANCE[self.dtype], scores[first]):
                raise EngineError(f"members {first} and {name} of the pool differ in their logprobs by {gap:.2e}")
        return scores[first]

    async def score_each(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """By every member in service, by name: the proof of a push names the one that failed it."""
        return await self._thread.call(self._supervisor.score_each(list(token_ids)))

    async def held_each(self) -> dict[str, Held | None]:
        """What every member in service samples with, by name; None: it cannot show that."""
        return await self._thread.call(self._supervisor.held_each())

    def _tell(self, kind: str, **details: Any) -> None:
        with suppress(OSError):  # a full disk is found out by whoever writes what cannot be missed
            self.on_event(kind, **details)
