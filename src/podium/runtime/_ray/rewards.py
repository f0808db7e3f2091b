"""Reward actors as one function of a group, under the rules of a pool (engine/_pool): the one with least to do scores
it, one that dies is replaced, and what it was scoring is scored by another."""

import time
from typing import Any

from podium.engine._pool.dispatch import REST_S
from podium.engine._pool.health import Pulse
from podium.engine._pool.members import Limit, Members, OnEvent
from podium.engine._pool.supervisor import Rules, Supervisor
from podium.engine._pool.thread import PoolThread
from podium.engine._pool.together import CLOSE_S, IDLE_S
from podium.errors import EngineError
from podium.records import Group
from podium.runtime._ray.actors import Actors, Member
from podium.runtime._ray.calls import named
from podium.runtime._ray.limits import Limits
from podium.runtime._rewards import ScoringRecipe

MAX_REDISPATCHES = 5
"""A group that takes one worker more down is not sent again: its rewards abstain."""
GROUP_S = 3600.0
GROUPS_AT_ONCE = 4
"""Per worker: rewards that wait, for a judge or a sandbox, do not keep the others of a worker waiting."""


class RewardMember(Member):
    engine: Any = None
    """It has none."""

    async def load(self, folder: Any, version: int) -> None:
        raise AssertionError("rewards have no weights")

    async def score(self, group: Group) -> Group:
        with named(self.name):
            return await self.actor.score.remote(group)


class RewardActors:
    def __init__(self, actors: Actors, recipe: ScoringRecipe, limits: Limits, on_event: OnEvent) -> None:
        self._actors, self._recipe, self._on_event = actors, recipe, on_event
        self.scoring = recipe.build(elsewhere=self.score)
        """The stage: it asks the actors, and starts nothing itself."""
        waits = (limits.max_restarts, limits.start_s, limits.recovery_s, IDLE_S)
        size = actors.num_bundles
        rules = Rules((size, size), 1, *waits, name=actors.name, kind="reward workers", floor_name="the fewest")
        self._members, self._thread = Members(), PoolThread()
        pulse = Pulse(limits.frozen_s, None)
        self._supervisor = Supervisor(self._members, rules, pulse, lambda: Limit(GROUPS_AT_ONCE), on_event)
        self._has_begun = False

    async def score(self, group: Group) -> Group:
        """In the place of `Scoring.score`; from the first call on, workers are watched."""
        if not group.rollouts:
            return group
        return await self._thread.call(self._score(group))

    def close(self) -> None:
        self._thread.finish(self._supervisor.close(), CLOSE_S)

    async def _score(self, group: Group) -> Group:
        if not self._has_begun:
            self._has_begun = True
            self._supervisor.start(self._launch, [])
        reasons: list[str] = []
        while len(reasons) <= MAX_REDISPATCHES:
            member = await self._members.acquire(1)
            worker: Any = member.worker
            told = {"ordinal": group.prompt.ordinal, "worker": member.name, "pid": worker.pid}
            started = time.monotonic()
            try:
                scored = await member.attempt(worker.score(group), GROUP_S)
            except EngineError as error:  # a reward's own failures are no engine's
                reasons.append(f"{member.name}: {error}")
                self._members.rest(member, REST_S)
                self._on_event("redispatched", worker=member.name, prompts=[told["ordinal"]], reason=reasons[-1])
                continue
            finally:
                self._members.release(member, 1)
            member.finished += 1
            self._on_event("scored", **told, seconds=time.monotonic() - started)
            return scored
        return self.scoring.unscored(group, f"{len(reasons)} reward workers failed at it, the last one: {reasons[-1]}")

    async def _launch(self, name: str) -> RewardMember:
        actor, about = await self._actors.take(name)
        member = RewardMember(name, actor, about)
        try:
            with named(name):
                await actor.prepare.remote(self._recipe)
        except BaseException:
            await member.end()
            raise
        return member
