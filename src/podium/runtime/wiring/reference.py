"""The reference in a process of its own, so that it need not fit into memory with the policy.

    batches ──► train_step ──► FrozenReference: the model as it was, never stepped
                     │ ◄────── logprobs [T]
                     └──► trainer.step, whose batches now carry the logprobs

`FrozenReference` computes with the trainer's own forward pass, so the logprobs are the same as those of a reference
that the trainer keeps. Runtime `local` places it in a child process (here), runtime `ray` in an actor (on_ray).
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from podium.errors import ReferenceLostError
from podium.model.forward import place, policy_logprobs
from podium.model.load import load_policy
from podium.model.products import products_dtype
from podium.records import Batch
from podium.remote.codec import decode, encode
from podium.remote.fork_server import BlockingChild, DiedError, ForkServer, RemoteError
from podium.settings.sections import Model, SeparateReference
from podium.settings.tables import Settings

START_S = 600.0
"""For the child process to load its model."""
ANSWER_S = 1800.0
"""For one batch."""


class Reference(Protocol):
    """A reference in whichever place."""

    def logprobs(self, batch: Batch) -> torch.Tensor: ...


class FrozenReference:
    """What runs in the other process: answers batches with the logprobs of the model as it was."""

    def __init__(self, model: Mapping[str, Any], precision: str | None, seed: int) -> None:
        """`model` is the settings' `[model]`, as plain data."""
        self._policy = load_policy(Model.model_validate(model), seed=seed)
        self._policy.model.eval()
        self._compute_dtype = products_dtype(precision, self._policy.model.dtype)

    def answer(self, content: bytes, reply: Callable[[bytes], None]) -> None:
        reply(encode(self.logprobs(decode(Batch, content)), torch.Tensor))

    @torch.no_grad()
    def logprobs(self, batch: Batch) -> torch.Tensor:
        """`[T]` at the batch's temperature."""
        logprobs, _ = policy_logprobs(self._policy.model, place(batch, self._policy.device), self._compute_dtype)
        return logprobs.cpu()


class ReferenceProcess:
    """A child process with a `FrozenReference`, ready once this object is made; it ends with this process."""

    def __init__(self, model: dict[str, Any], device: str, precision: str | None, seed: int) -> None:
        given = {"model": model | {"device": device.partition(":")[0]}, "precision": precision, "seed": seed}
        recipe, environment = f"{__name__}:FrozenReference", _environment(device)
        server = ForkServer(recipe, given, is_shared=False, start_s=START_S, environment=environment)
        with _losses_named(START_S):
            self._child = BlockingChild(server)

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """`[T]` at the batch's temperature."""
        with _losses_named(ANSWER_S):
            return decode(torch.Tensor, self._child.call("answer", encode(batch), ANSWER_S))

    def close(self) -> None:
        self._child.close()


@contextmanager
def _losses_named(limit_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise ReferenceLostError(f"the process of the reference gave no answer within {limit_s:g} s") from None
    except DiedError as death:
        raise ReferenceLostError(
            f"the reference is lost: {death}; its last words are above. The run can be resumed from its last commit"
        ) from None
    except RemoteError as error:
        raise ReferenceLostError(f"the process of the reference failed: {error}") from None


def with_reference_logprobs(reference: Reference, batches: Sequence[Batch]) -> list[Batch]:
    """The batches with the reference's logprobs, for a trainer that keeps no reference itself."""
    return [replace(batch, reference_logprobs=reference.logprobs(batch)) for batch in batches]


def start_reference(settings: Settings) -> ReferenceProcess | None:
    """The process of a separate reference; None where the trainer keeps the reference, or there is none."""
    given = settings.model.reference
    if not isinstance(given, SeparateReference):
        return None
    model, precision, seed = reference_needs(settings)
    return ReferenceProcess(model, given.device, precision, seed)


def reference_needs(settings: Settings) -> tuple[dict[str, Any], str | None, int]:
    """What a `FrozenReference` is made with: the model's table, the precision and the seed."""
    model = settings.model.model_dump(mode="json", exclude={"reference"}, exclude_none=True)
    return model, settings.trainer.options.get("precision"), settings.run.seed


def _environment(device: str) -> dict[str, str]:
    """Makes only the chosen GPU visible to the child process."""
    kind, _, number = device.partition(":")
    if kind == "cpu" or not number:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[int(number)] if visible else number}
