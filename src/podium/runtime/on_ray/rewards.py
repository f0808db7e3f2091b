"""Reward actors as one function of a group: a pool (remote/pool.py) whose members Ray starts.

Imports no torch, so that a new actor starts quickly.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from podium.records import Group
from podium.remote.pool import Limit, Member, OnEvent, Pool, RetriesError, Rules
from podium.remote.tasks import LoopThread
from podium.reward.build import ScoringRecipe
from podium.reward.scoring.stage import Scoring
from podium.runtime.on_ray.actors import ActorGroup, Handle, RunActor

GROUPS_AT_ONCE = 4
"""Per worker: rewards that wait for a judge or a sandbox do not block other groups."""
CLOSE_S = 60.0


class RewardActor(RunActor):
    """A reward worker: scores whole groups. Rewards with a time limit run in processes of its own, as without Ray."""

    def open(self) -> None:
        self._recipe: ScoringRecipe | None = None
        self._scoring: Scoring | None = None

    async def start(self) -> dict[str, Any]:
        return self.about()

    async def prepare(self, recipe: ScoringRecipe) -> None:
        """Finds the rewards; a reward that is missing, or cannot run here, is an error."""
        if recipe != self._recipe:
            if self._scoring is not None:
                self._scoring.close()
            self._scoring, self._recipe = recipe.build(), recipe

    async def score(self, group: Group) -> Group:
        assert self._scoring is not None
        return await self._scoring.score(group)


class RewardWorker(Handle):
    kind = RewardActor


class RewardActors:
    """A group at which more than `rules.max_redispatches` workers failed is not sent again: its rewards abstain."""

    def __init__(self, actors: ActorGroup, recipe: ScoringRecipe, rules: Rules, on_event: OnEvent) -> None:
        self._actors, self._recipe, self._on_event = actors, recipe, on_event
        self.scoring = recipe.build(elsewhere=self.score)
        """The reward stage: it asks the actors and starts no process."""
        rules = replace(rules, replicas=(actors.count, actors.count), name=actors.name, kind="reward workers")

        def new_member(name: str, worker: RewardWorker) -> Member[RewardWorker]:
            return Member(name, worker, Limit(GROUPS_AT_ONCE))

        self._pool: Pool[Member[RewardWorker]] = Pool(rules, new_member, self._prepare, on_event)
        self._thread = LoopThread()
        self._has_started = False

    async def score(self, group: Group) -> Group:
        """Takes the place of `Scoring.score`. The first call starts the pool."""
        if not group.rollouts:
            return group
        return await self._thread.call(self._score(group))

    def close(self) -> None:
        self._thread.finish(self._pool.close(), CLOSE_S)

    async def _score(self, group: Group) -> Group:
        if not self._has_started:
            self._has_started = True
            self._pool.start(self._actors.take)
        ordinal = group.prompt.ordinal

        async def ask(member: Member[RewardWorker]) -> Group:
            started = time.monotonic()
            scored = await member.worker.call("score", group)
            seconds = time.monotonic() - started
            self._on_event("scored", ordinal=ordinal, worker=member.name, pid=member.worker.pid, seconds=seconds)
            return scored

        try:
            return await self._pool.send(lambda: 1, ask, lambda: {"prompts": [ordinal]})
        except RetriesError as error:
            reason = f"{len(error.reasons)} reward workers failed at it, the last one: {error.reasons[-1]}"
            return self.scoring.unscored(group, reason)

    async def _prepare(self, member: Member[RewardWorker]) -> Mapping[str, Any]:
        """The worker finds its rewards; a reward that cannot run there is an error."""
        await member.worker.call("prepare", self._recipe)
        return {}
