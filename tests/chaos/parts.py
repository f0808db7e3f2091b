"""Real parts with one fault each, named in the settings as `tests.chaos.parts:NAME`. Each prints what it does."""

import asyncio
import ctypes
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import torch

from podium import declare_range
from podium.engine.inprocess import Inprocess
from podium.errors import EngineError
from podium.loss.grpo import grpo
from podium.model.device_thread import on_device_thread
from podium.records import Answer, Batch, PolicyLoss, Prompt, Request, Rollout, Sampling
from podium.trainer.single import Single

FIRST = 4
"""Ordinal from which on faults happen: 2 prompts a step, so in the third step."""


def say(what: str) -> None:
    print(f"fault: {what}", file=sys.stderr, flush=True)


class HangingEngine(Inprocess):
    """Waits for ever, and the event loop goes on."""

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Answer]:
        async for answer in super().generate(requests, sampling):
            if answer.key > FIRST:
                say("hangs")
                await asyncio.sleep(3600)
            yield answer


class StuckEngine(Inprocess):
    """Its thread is stuck in a call that nothing can end."""

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Answer]:
        async for answer in super().generate(requests, sampling):
            if answer.key >= FIRST:
                say("is stuck")
                await on_device_thread(time.sleep, 3600)
            yield answer


class GreedyEngine(Inprocess):
    """A C call that never gives the interpreter back."""

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Answer]:
        async for answer in super().generate(requests, sampling):
            if answer.key >= FIRST:
                say("holds the interpreter")
                await on_device_thread(ctypes.PyDLL(None).sleep, 3600)
            yield answer


class DeadEngine(Inprocess):
    """From then on every call breaks off."""

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Answer]:
        async for answer in super().generate(requests, sampling):
            if answer.key >= FIRST:
                say("breaks off")
                raise EngineError("the connection is gone")
            yield answer


class FlakyEngine(Inprocess):
    """Breaks off once in the middle of a call, and once answers with a logprob that is no number."""

    has_broken, has_lied = False, False

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Answer]:
        async for answer in super().generate(requests, sampling):
            if answer.key == FIRST + 1 and not self.has_broken:
                self.has_broken = True
                say("breaks off")
                raise EngineError("the connection is gone")
            if answer.key == FIRST + 2 and not self.has_lied:
                self.has_lied = True
                say("lies")
                yield not_a_number(answer)
            else:
                yield answer


class LyingEngine(Inprocess):
    """Can never answer one prompt."""

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Answer]:
        async for answer in super().generate(requests, sampling):
            if answer.key == FIRST + 1:
                say("lies")
                yield not_a_number(answer)
            else:
                yield answer


class TardyEngine(Inprocess):
    """Its answers come one by one, in an order of their own and after waits of their own."""

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Answer]:
        answers = [answer async for answer in super().generate(requests, sampling)]
        rng = random.Random(answers[0].key)
        rng.shuffle(answers)
        for answer in answers:
            await asyncio.sleep(rng.uniform(0, 0.15))
            yield answer


class OftenFailingEngine(Inprocess):
    """One prompt in a hundred can never be answered; one in fifty breaks the call off, once."""

    def __init__(self, policy, snapshot=False, *, concurrency: int = 512) -> None:
        super().__init__(policy, snapshot, concurrency=concurrency)
        self._broken: set[int] = set()

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Answer]:
        async for answer in super().generate(requests, sampling):
            if answer.key % 50 == 7 and answer.key not in self._broken:
                self._broken = {answer.key}
                raise EngineError("the connection is gone")
            yield not_a_number(answer) if answer.key % 100 == 3 else answer


def not_a_number(answer: Answer) -> Answer:
    first = (float("nan"),) * len(answer.logprobs[0])
    return replace(answer, logprobs=(first, *answer.logprobs[1:]))


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


@declare_range(0.0, 1.0)
def even_tokens(prompt: Prompt, rollout: Rollout) -> float:
    """Differs within most groups, whatever is written, so that every step trains."""
    return float(sum(rollout.token_ids) % 2 == 0)
