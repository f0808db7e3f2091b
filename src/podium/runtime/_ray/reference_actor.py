"""The frozen reference in a process of its own: answers batches with the logprobs of the model as it was."""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from podium.runtime._ray.tenant import Place, Tenant
from podium.runtime._ray.trainer_actor import as_array
from podium.runtime._reference_process import Frozen


class ReferenceActor(Tenant):
    def __init__(self, place: Place, model: Mapping[str, Any], precision: str, seed: int) -> None:
        super().__init__(place)
        self._needs = model, precision, seed

    async def load(self) -> dict[str, Any]:
        self._frozen = await asyncio.to_thread(Frozen, *self._needs)
        return self.about()

    async def answer(self, batch: np.ndarray) -> np.ndarray:
        return as_array(await asyncio.to_thread(self._frozen.answer, batch.tobytes()))
