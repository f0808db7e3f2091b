"""From requests to answers, over members that may go away at any time.

Requests are cut into parcels, always in the same way; a parcel is one request to one member and is sent again whole
when that member is lost, so its rollouts are written in the same company and are the same. Answers that had arrived
before are not taken twice. A parcel that fails too often is an error, never a rollout without tokens.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from time import monotonic
from typing import Any

from podium.engine._pool.members import Member, Members, OnEvent
from podium.errors import BusyError, EngineError
from podium.records import Answer, Request, Sampling

REST_S = 0.5
"""A member that is busy, or failed at a request, is left alone for so long: by then it is known whether it is dead."""
MAX_FAILED = 3
"""Requests in a row that a member may fail before it is taken for broken."""


@dataclass(frozen=True)
class Terms:
    """How requests are sent."""

    prompts_per_request: int
    in_order: bool
    """Answers leave in the order of their requests."""
    max_redispatches: int
    request_s: float
    busy_s: float
    """For so long may every member say that it is busy."""


class Dispatch:
    def __init__(self, members: Members, terms: Terms, on_event: OnEvent) -> None:
        self._members, self._terms, self._on_event = members, terms, on_event

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Answer]:
        arrived: asyncio.Queue[Answer | BaseException] = asyncio.Queue()
        size = self._terms.prompts_per_request
        parcels = [requests[start : start + size] for start in range(0, len(requests), size)]
        tasks = [asyncio.create_task(self._deliver(parcel, sampling, arrived)) for parcel in parcels]
        order = [request.key for request in requests]
        held: dict[int, Answer] = {}
        try:
            for _ in requests:
                thing = await arrived.get()
                if isinstance(thing, BaseException):
                    raise thing
                held[thing.key] = thing
                while order and held and (order[0] in held or not self._terms.in_order):
                    key = order[0] if self._terms.in_order else next(iter(held))
                    order.remove(key)
                    yield held.pop(key)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _deliver(self, parcel: Sequence[Request], sampling: Sampling, arrived: asyncio.Queue[Any]) -> None:
        """One parcel, from member to member until all of its answers are there."""
        missing = {request.key: request for request in parcel}
        rollouts = sum(len(request.seeds) for request in parcel)
        reasons: list[str] = []
        busy_until: float | None = None
        try:
            while len(reasons) <= self._terms.max_redispatches:
                member = await self._members.acquire(rollouts)
                try:
                    await member.attempt(self._ask(member, parcel, sampling, missing, arrived), self._terms.request_s)
                    return
                except BusyError as error:
                    busy_until = busy_until or monotonic() + self._terms.busy_s
                    if monotonic() > busy_until:
                        raise EngineError(f"{member.name} has been busy for {self._terms.busy_s:g} s") from error
                    member.limit.refused()
                    self._members.rest(member, REST_S)
                except EngineError as error:
                    reasons.append(f"{member.name}: {error}")
                    self._failed(member, list(missing), reasons)
                finally:
                    self._members.release(member, rollouts)
            raise EngineError(
                f"prompts {', '.join(map(str, missing))} were given up after {len(reasons)} members failed at them "
                f"(engine.max_redispatches = {self._terms.max_redispatches}): {'; '.join(reasons)}"
            )
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            arrived.put_nowait(error)

    def _failed(self, member: Member, missing: list[int], reasons: list[str]) -> None:
        self._members.rest(member, REST_S)
        member.failed += 1
        if member.failed >= MAX_FAILED:
            member.accuse(f"{member.failed} requests in a row failed, the last one: {reasons[-1]}")
        if len(reasons) <= self._terms.max_redispatches:
            self._on_event("redispatched", worker=member.name, prompts=missing, reason=reasons[-1])

    async def _ask(
        self,
        member: Member,
        parcel: Sequence[Request],
        sampling: Sampling,
        missing: dict[int, Request],
        arrived: asyncio.Queue[Any],
    ) -> None:
        started, longest, again = monotonic(), 1, []
        async with aclosing(member.worker.engine.generate(parcel, sampling)) as answers:
            async for answer in answers:
                if answer.key not in missing:  # it arrived the first time already
                    again.append(answer.key)
                    continue
                longest = max(longest, *map(len, answer.token_ids))
                del missing[answer.key]
                arrived.put_nowait(answer)
        if again:
            self._on_event("answered_twice", worker=member.name, prompts=again)
        if missing:
            raise EngineError(f"it left {len(missing)} prompts without an answer")
        member.failed, member.finished = 0, member.finished + 1
        group, wanted = len(parcel[0].seeds), self._members.waiting_since is not None
        member.limit.finished(monotonic() - started, longest, group, wanted)
