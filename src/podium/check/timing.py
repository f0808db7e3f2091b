"""How long a step will take, measured with a short step on this device.

As many rollouts as a step has are generated, with a few tokens each, and trained on. Sampling time grows with the
length of answers and training time with tokens. So both are estimated for answers as long as the policy's are now, and
for the longest that the settings allow.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from podium.loss.build import build_objective
from podium.model.load import Policy
from podium.pack import build_pack
from podium.records import Answer, Group, PrefixGroup, Prompt, Request, Rollout, Sampling
from podium.runtime.wiring.memory import MemoryPlan
from podium.runtime.wiring.trainer import start_reference, train_step
from podium.settings.tables import Settings
from podium.stages import Engine
from podium.trainer.build import build_trainer

MOST_ROLLOUTS = 256
MOST_TOKENS = 16


@dataclass(frozen=True)
class Trial:
    """The measured seconds, and what was measured."""

    rollouts: int
    tokens: int
    """Per rollout."""
    prompt_tokens: float
    """Mean per prompt."""
    first_token_s: float
    """Reading the prompts and generating the first token of every rollout."""
    sample_s: float
    """Generating all tokens."""
    train_s: float
    """One trainer step on the rollouts, after a first that is not measured."""


def sampling_s(trial: Trial, rollouts: int, length: float) -> float:
    """Seconds to sample that many rollouts of that length."""
    per_token = max(0.0, trial.sample_s - trial.first_token_s) / max(1, trial.tokens - 1)
    return (trial.first_token_s + per_token * (length - 1)) * rollouts / trial.rollouts


def training_s(trial: Trial, rollouts: int, length: float) -> float:
    """Seconds to train on that many rollouts of that length, in proportion to their tokens."""
    per_token = trial.train_s / (trial.rollouts * (trial.prompt_tokens + trial.tokens))
    return per_token * rollouts * (trial.prompt_tokens + length)


async def run_trial(
    settings: Settings, policy: Policy, engine: Engine, prompts: Sequence[Prompt], memory: MemoryPlan
) -> Trial:
    """`prompts` are at most those of a step. The engine must have answered before, so that no one-time work counts.

    Changes the policy's weights, so the policy must not be used afterwards.
    """
    some = some_of(settings, prompts)
    tokens = min(settings.rollout.options.get("max_new_tokens", MOST_TOKENS), MOST_TOKENS)
    first_token_s, _ = await sampled(settings, engine, some, 1)
    sample_s, groups = await sampled(settings, engine, some, tokens)
    objective, checkpointing = build_objective(settings), memory.gradient_checkpointing
    trainer = build_trainer(settings, policy, objective, settings.plan.steps, checkpointing)
    train_s = await _trained(settings, trainer, groups, memory.max_tokens_per_batch)
    mean = sum(len(prompt.token_ids) for prompt in some) / len(some)
    return Trial(len(some) * settings.run.rollouts_per_prompt, tokens, mean, first_token_s, sample_s, train_s)


def some_of(settings: Settings, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """As many of the prompts as are worth the time."""
    return prompts[: max(1, MOST_ROLLOUTS // settings.run.rollouts_per_prompt)]


async def _trained(settings: Settings, trainer: Any, groups: Sequence[Group], max_tokens_per_batch: int) -> float:
    """Seconds of the second step; the first compiles and allocates."""
    reference = start_reference(settings)
    try:
        batches = build_pack(settings, max_tokens_per_batch)(groups)
        await train_step(trainer, reference, None, batches)
        started = time.perf_counter()
        await train_step(trainer, reference, None, batches)
        return time.perf_counter() - started
    finally:
        if reference is not None:
            reference.close()


async def sampled(
    settings: Settings, engine: Engine, prompts: Sequence[Prompt], tokens: int
) -> tuple[float, list[Group]]:
    """The seconds, and groups in which half of the rewards are 1. No token ends a rollout: all have the same length."""
    count = settings.run.rollouts_per_prompt
    sampling = Sampling(tokens, settings.rollout.options.get("temperature", 1.0))
    requests = [
        Request(prompt.token_ids, sampling, seed, PrefixGroup(f"timing/{prompt.ordinal}", count))
        for prompt in prompts
        for seed in range(1, count + 1)
    ]
    started = time.perf_counter()
    answers = iter(await asyncio.gather(*(engine.generate(request) for request in requests)))
    seconds = time.perf_counter() - started
    return seconds, [_group(prompt, list(islice(answers, count))) for prompt in prompts]


def _group(prompt: Prompt, answers: Sequence[Answer]) -> Group:
    rollouts = tuple(
        Rollout(a.token_ids, a.logprobs, (1,) * len(a.token_ids), "length", "", 0, 0, index, 0, a.digest)
        for index, a in enumerate(answers)
    )
    signs: Any = tuple(float(index % 2) for index in range(len(rollouts)))
    return Group(prompt, rollouts, rewards=signs, advantages=tuple(2 * sign - 1 for sign in signs))
