"""Real parts with one fault each, named in the settings as `tests.chaos.parts:NAME`. Each prints what it does."""

import asyncio
import ctypes
import random
import sys
import time
from dataclasses import replace

import torch

from podium.engine.inprocess import Inprocess
from podium.errors import EngineError
from podium.loss.grpo import grpo
from podium.model.device_thread import on_device_thread
from podium.records import Answer, Batch, PolicyLoss, Request
from podium.stages import OnTokens
from podium.trainer.single import Single

FIRST = 4
"""Ordinal from which on faults happen: 2 prompts a step, so in the third step."""


def noisy_loss(policy_logprobs: torch.Tensor, old_logprobs: torch.Tensor, batch: Batch) -> PolicyLoss:
    """Every token counts a little more or less, by torch's random numbers: no fault, but a resume must restore them.

    The noise is far above the last bit of a float and far below what the check of a batch in two pieces allows.
    """
    made = grpo(policy_logprobs, old_logprobs, batch)
    return replace(made, per_token=made.per_token * (1 + 2e-5 * (torch.rand_like(made.per_token.detach()) - 0.5)))


def say(what: str) -> None:
    print(f"fault: {what}", file=sys.stderr, flush=True)


class OrdinalEngine(Inprocess):
    """Knows which prompt a request is of."""

    def __init__(self, policy, snapshot=False, *, concurrency: int = 512) -> None:
        super().__init__(policy, snapshot, concurrency=concurrency)
        self._ordinals: dict[int, int] = {}

    def ordinal(self, request: Request) -> int:
        """By the name of its group. A request that is sent again has no group, but the seed of the first."""
        if request.prefix_group is not None:
            self._ordinals[request.seed] = int(request.prefix_group.name.rpartition("/")[2])
        return self._ordinals[request.seed]

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Answer:
        ordinal = self.ordinal(request)
        return await self.spoiled(ordinal, await super().generate(request, on_tokens))

    async def spoiled(self, ordinal: int, answer: Answer) -> Answer:
        """What becomes of the answer to that prompt."""
        return answer


class HangingEngine(OrdinalEngine):
    """Waits for ever, and the event loop goes on."""

    async def spoiled(self, ordinal: int, answer: Answer) -> Answer:
        if ordinal > FIRST:
            say("hangs")
            await asyncio.sleep(3600)
        return answer


class StuckEngine(OrdinalEngine):
    """Its thread is stuck in a call that nothing can end."""

    async def spoiled(self, ordinal: int, answer: Answer) -> Answer:
        if ordinal >= FIRST:
            say("is stuck")
            await on_device_thread(time.sleep, 3600)
        return answer


class GreedyEngine(OrdinalEngine):
    """A C call that never gives the interpreter back."""

    async def spoiled(self, ordinal: int, answer: Answer) -> Answer:
        if ordinal >= FIRST:
            say("holds the interpreter")
            await on_device_thread(ctypes.PyDLL(None).sleep, 3600)
        return answer


class DeadEngine(OrdinalEngine):
    """From then on every call breaks off."""

    async def spoiled(self, ordinal: int, answer: Answer) -> Answer:
        if ordinal >= FIRST:
            say("breaks off")
            raise EngineError("the connection is gone")
        return answer


class FlakyEngine(OrdinalEngine):
    """Breaks off once, and once answers with a logprob that is no number."""

    has_broken, has_lied = False, False

    async def spoiled(self, ordinal: int, answer: Answer) -> Answer:
        if ordinal == FIRST + 1 and not self.has_broken:
            self.has_broken = True
            say("breaks off")
            raise EngineError("the connection is gone")
        if ordinal == FIRST + 2 and not self.has_lied:
            self.has_lied = True
            say("lies")
            return not_a_number(answer)
        return answer


class LyingEngine(OrdinalEngine):
    """Can never answer one prompt."""

    async def spoiled(self, ordinal: int, answer: Answer) -> Answer:
        if ordinal == FIRST + 1:
            say("lies")
            return not_a_number(answer)
        return answer


class TardyEngine(OrdinalEngine):
    """Its answers come one by one, in an order of their own and after waits of their own."""

    def __init__(self, policy, snapshot=False, *, concurrency: int = 512) -> None:
        super().__init__(policy, snapshot, concurrency=concurrency)
        self.traits = replace(self.traits, keeps_order=False)

    async def spoiled(self, ordinal: int, answer: Answer) -> Answer:
        await asyncio.sleep(random.Random(answer.digest).uniform(0, 0.3))
        return answer


class OftenFailingEngine(OrdinalEngine):
    """One prompt in a hundred can never be answered; one in fifty breaks a call off, once."""

    _broken: int | None = None

    async def spoiled(self, ordinal: int, answer: Answer) -> Answer:
        if ordinal % 50 == 7 and ordinal != self._broken:
            self._broken = ordinal
            raise EngineError("the connection is gone")
        return not_a_number(answer) if ordinal % 100 == 3 else answer


def not_a_number(answer: Answer) -> Answer:
    return replace(answer, logprobs=(float("nan"),) * len(answer.logprobs))


class PoisoningTrainer(Single):
    """An update after which a weight is no number, though loss and gradient were finite."""

    async def step(self, batches):
        result = await super().step(batches)
        if self._num_steps >= 2:
            say("poisons a weight")
            with torch.no_grad():
                next(iter(self._parameters.values())).view(-1)[0] = float("nan")
        return result


class EndlessTrainer(Single):
    """Its second step never ends."""

    async def step(self, batches):
        if self._num_steps >= 1:
            say("trains for ever")
            await asyncio.sleep(3600)
        return await super().step(batches)


def poisoned_loss(policy_logprobs: torch.Tensor, old_logprobs: torch.Tensor, batch: Batch) -> PolicyLoss:
    """Not finite, in every step."""
    say("poisons the loss")
    right = grpo(policy_logprobs, old_logprobs, batch)
    return replace(right, per_token=right.per_token * float("inf"))
