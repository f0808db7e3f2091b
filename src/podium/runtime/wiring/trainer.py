"""The trainer in one process, whichever it is, and a reference in a process of its own.

    batches ──► train_step ──► Reference: the model as it was, never stepped
                     │ ◄────── logprobs [T]
                     └──► HostedTrainer.trainer.step, whose batches now carry the logprobs

A `HostedTrainer` is in this process, a rank, a Ray actor or a Flyte container; a runtime adds only how calls reach it.
A `FrozenReference` is in a child process (`ReferenceProcess`) or a Ray actor. It computes with the trainer's own
forward pass, so the logprobs are the same as those of a reference that the trainer keeps.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from podium.errors import ReferenceLostError
from podium.loss.build import build_objective
from podium.model.device_thread import on_device_thread
from podium.model.evidence import Held, difference
from podium.model.forward import place, policy_logprobs, products_dtype
from podium.model.handoff import publish
from podium.model.load import load_policy
from podium.records import Batch, UpdateResult
from podium.remote.codec import decode, encode
from podium.remote.fork_server import BlockingChild, DiedError, ForkServer, RemoteError
from podium.run.build import load_start
from podium.runtime.ranks import Line, RankedTrainer
from podium.runtime.wiring.memory import MemoryPlan, memory_plan
from podium.settings.sections import Model, SeparateReference
from podium.settings.tables import Settings
from podium.stages import Trainer
from podium.sync import check_finite
from podium.trainer.build import build_trainer

START_S = 600.0
"""For the child process to load its model."""
ANSWER_S = 1800.0
"""For the reference's logprobs of one batch."""


class HostedTrainer:
    """Loads the policy at once; `build` makes the trainer, once the data is known."""

    memory: MemoryPlan
    base_digest: str | None = None
    """Of the weights under the adapter, taken before they are spread over ranks; None for full weights, and on ranks
    other than 0, which are compared to it."""
    own: Any
    """The trainer of this process alone."""
    trainer: Any
    """On rank 0 of several, the trainers of all ranks; else `own`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.policy = load_policy(settings.model, seed=settings.run.seed)

    def build(self, num_steps: int, longest_prompt: int, line: Line | None = None) -> None:
        """`longest_prompt` in tokens, of the training data. `line`: this process is one of several ranks."""
        self.memory = memory_plan(self.settings, self.policy, longest_prompt)
        if line is None or not line.rank:
            self.base_digest = self.policy.base_digest()
        if line is not None:
            line.note_loaded(self.policy)
        objective, checkpointing = build_objective(self.settings), self.memory.gradient_checkpointing
        self.own = build_trainer(self.settings, self.policy, objective, num_steps, checkpointing)
        self.trainer = self.own if line is None or line.rank else RankedTrainer(self.own, line)

    def load_start(self) -> None:
        """Gives the trainer the weights that a new run starts from."""
        load_start(self.settings, self.policy, self.trainer)

    async def check_finite(self, when: str) -> None:
        """Raises `WeightsError` unless every trained weight is a finite number."""
        await on_device_thread(check_finite, self.trainer.weights(), when)

    def publish(self, root: Path, version: int) -> Path:
        """Writes the weights for engines; the folder that holds them."""
        return publish(root, self.policy, self.trainer.weights(), version)

    async def difference(self, held: Held) -> str | None:
        """What differs between an engine's weights and the trainer's; None where they are the same."""
        scale = None if self.policy.peft is None else self.policy.adapter_scale
        return await on_device_thread(difference, self.trainer.weights(), held, scale)


class Reference(Protocol):
    """A reference in whichever place."""

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """`[T]` at the batch's temperature."""
        ...


async def train_step(
    trainer: Trainer, reference: Reference | None, sleeper: Any, batches: Sequence[Batch]
) -> UpdateResult:
    """One step of the trainer, with the logprobs of a separate reference. `sleeper` is the engine that sleeps during
    the step (`engine.sleep`), or None."""
    if reference is not None:
        found = await asyncio.to_thread(lambda: [reference.logprobs(batch) for batch in batches])
        batches = [replace(batch, reference_logprobs=its) for batch, its in zip(batches, found, strict=True)]
    if sleeper is None:
        return await trainer.step(batches)
    await sleeper.sleep()
    try:
        return await trainer.step(batches)
    finally:
        await sleeper.wake()


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
        logprobs, _ = policy_logprobs(self._policy.model, place(batch, self._policy.device), self._compute_dtype)
        return logprobs.cpu()


class ReferenceProcess:
    """A child process with a `FrozenReference`, ready once this object is made; it ends with this process."""

    def __init__(self, model: Mapping[str, Any], precision: str | None, seed: int) -> None:
        """As for `FrozenReference`; a numbered device such as "cuda:1" is the only GPU that the child sees."""
        kind, _, number = model["device"].partition(":")
        given = {"model": {**model, "device": kind}, "precision": precision, "seed": seed}
        environment = {}
        if number:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(number)] if visible else number
        recipe = f"{__name__}:FrozenReference"
        server = ForkServer(recipe, given, is_shared=False, start_s=START_S, environment=environment)
        with _losses_named(START_S):
            self._child = BlockingChild(server)

    def logprobs(self, batch: Batch) -> torch.Tensor:
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


def reference_needs(settings: Settings) -> tuple[dict[str, Any], str | None, int] | None:
    """What a separate reference is made with: the model's table, the precision and the seed. None where the trainer
    keeps the reference, or there is none."""
    given = settings.model.reference
    if not isinstance(given, SeparateReference):
        return None
    model = settings.model.model_dump(mode="json", exclude={"reference"}, exclude_none=True)
    return model | {"device": given.device}, settings.trainer.options.get("precision"), settings.run.seed


def start_reference(settings: Settings) -> ReferenceProcess | None:
    needs = reference_needs(settings)
    return None if needs is None else ReferenceProcess(*needs)
