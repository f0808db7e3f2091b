"""The driver's end of the trainer's actor: the trainer that the loop and the checkpoint know."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch

from podium.errors import TrainerLostError
from podium.model.evidence import Held
from podium.model.handoff import write_files
from podium.records import Batch, UpdateResult
from podium.runtime import _wire as bytes_of
from podium.runtime._ray.calls import named
from podium.runtime._ray.rollouts import Shipment
from podium.runtime._ray.trainer_actor import as_array
from podium.sync._delivery import Delivery

CALL_S = 3600.0
WHO = "the trainer's actor"


@dataclass(frozen=True)
class RemotePolicy:
    """What the driver knows of a policy whose weights are elsewhere."""

    tokenizer: Any
    stop_ids: tuple[int, ...]
    max_context_tokens: int
    vocabulary: int
    base_digest: str | None
    """Of the weights under the adapter; None for full weights."""


class RemoteTrainer:
    """Records go there as bytes, and results come back. If the actor dies, whoever waits for it is told at once: the
    run ends, and goes on from its last commit when it is resumed."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def step(self, batches: Sequence[Batch]) -> UpdateResult:
        with _lost_named():
            return await self._actor.step.remote(bytes_of.batches_to_bytes(batches))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        with _lost_named():
            return await self._actor.score.remote(list(token_ids))

    async def difference(self, held: Held) -> str | None:
        with _lost_named():
            return await self._actor.difference.remote(held)

    async def ship(self, version: int) -> Shipment:
        """The weights as they are now; they stay in the object store."""
        sha256, crate = self._actor.publish.options(num_returns=2).remote(version)
        with _lost_named():
            return Shipment(crate, await sha256)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("weights go to the workers as a crate")

    def state(self) -> Mapping[str, torch.Tensor]:
        return bytes_of.tensors_from_bytes(self._ask("state").tobytes())

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._ask("load_state", as_array(bytes_of.tensors_to_bytes(tensors)))

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._ask("load_weights", as_array(bytes_of.tensors_to_bytes(tensors)))

    def load_start(self) -> None:
        self._ask("load_start")

    def save_model(self, folder: str) -> None:
        write_files(self._ask("save_model"), Path(folder))

    def _ask(self, call: str, *arguments: Any) -> Any:
        with _lost_named():
            return ray.get(getattr(self._actor, call).remote(*arguments), timeout=CALL_S)


class StoreDelivery(Delivery):
    """Weights go from the trainer's actor to the workers by the object store, and not through the driver."""

    async def check_weights(self, version: int) -> None:
        """The actor looks at them before it gives them away."""

    async def difference(self, held: Held) -> str | None:
        """The actor compares: the trainer's weights are there."""
        trainer: Any = self.trainer
        return await trainer.difference(held)

    async def by_folder(self, root: Path | None, version: int) -> None:
        trainer: Any = self.trainer
        engine: Any = self.engine
        await engine.load_shipment(await trainer.ship(version), version)


def _lost_named() -> Any:
    return named(WHO, TrainerLostError)
