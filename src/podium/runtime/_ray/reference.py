"""The driver's end of the reference's actor."""

from typing import Any

import ray
import torch

from podium.errors import ReferenceLostError
from podium.records import Batch
from podium.runtime import _wire as bytes_of
from podium.runtime._ray.calls import named
from podium.runtime._ray.trainer_actor import as_array
from podium.runtime._reference import ANSWER_S


class RemoteReference:
    """If the actor dies, the run ends, and goes on from its last commit when it is resumed."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """`[T]` at the batch's temperature."""
        with named("the reference's actor", ReferenceLostError):
            call = self._actor.answer.remote(as_array(bytes_of.batches_to_bytes([batch])))
            answer: Any = ray.get(call, timeout=ANSWER_S)
        return bytes_of.tensors_from_bytes(answer.tobytes())["logprobs"]
