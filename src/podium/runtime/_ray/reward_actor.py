"""A reward worker: scores whole groups. Rewards with a time limit run in processes of their own below it, as they do
without Ray. Imports no torch, so that a new one is there quickly."""

import hashlib
from typing import Any

from podium.records import Group
from podium.reward._scoring import Scoring
from podium.runtime._ray.tenant import Place, Tenant
from podium.runtime._rewards import ScoringRecipe


class RewardActor(Tenant):
    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._scoring: Scoring | None = None
        self._digest = ""

    async def start(self) -> dict[str, Any]:
        return self.about()

    async def prepare(self, recipe: ScoringRecipe) -> None:
        """Finds the rewards; one that is not there, or cannot run here, is an error."""
        digest = hashlib.sha256(repr(recipe).encode()).hexdigest()
        if digest != self._digest:
            if self._scoring is not None:
                self._scoring.close()
            self._scoring, self._digest = recipe.build(), digest

    async def score(self, group: Group) -> Group:
        assert self._scoring is not None
        return await self._scoring.score(group)
