"""How long a step will take, found by doing a little of one on this device.

As many rollouts as a step has are written, a few tokens each, and trained on. Sampling time grows with the length of
answers and training time with tokens, so both are told for answers as long as the policy writes now and for the longest
that the settings allow.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from podium.model.load import Policy
from podium.records import Answer, Group, Prompt, Request, Rollout, Sampling
from podium.runtime._build import build_pack, make_trainer
from podium.runtime._memory import MemoryPlan
from podium.runtime._reference import with_reference
from podium.settings import Settings
from podium.stages import Engine

MOST_ROLLOUTS = 256
MOST_TOKENS = 16


@dataclass(frozen=True)
class Trial:
    """Seconds that were measured, and of what."""

    rollouts: int
    tokens: int
    """Of each rollout."""
    prompt_tokens: float
    """Mean."""
    first_token_s: float
    """The prompts, and a first token for every rollout."""
    sample_s: float
    """All tokens."""
    train_s: float
    """One trainer step on them, not the first."""


def sampling_s(trial: Trial, rollouts: int, length: float) -> float:
    """For so many rollouts of that length."""
    per_token = max(0.0, trial.sample_s - trial.first_token_s) / max(1, trial.tokens - 1)
    return (trial.first_token_s + per_token * (length - 1)) * rollouts / trial.rollouts


def training_s(trial: Trial, rollouts: int, length: float) -> float:
    """By tokens."""
    per_token = trial.train_s / (trial.rollouts * (trial.prompt_tokens + trial.tokens))
    return per_token * rollouts * (trial.prompt_tokens + length)


async def run_trial(
    settings: Settings, policy: Policy, engine: Engine, prompts: Sequence[Prompt], memory: MemoryPlan
) -> Trial:
    """`prompts` are at most a step's; the engine has answered before, so nothing is measured that happens once only.

    Changes the policy's weights: for one that is thrown away.
    """
    some = some_of(settings, prompts)
    tokens = min(settings.rollout.options.get("max_new_tokens", MOST_TOKENS), MOST_TOKENS)
    first_token_s, _ = await sampled(settings, engine, some, 1)
    sample_s, groups = await sampled(settings, engine, some, tokens)
    train_s = await _trained(settings, make_trainer(settings, policy, settings.plan, memory), groups, memory)
    mean = sum(len(prompt.token_ids) for prompt in some) / len(some)
    return Trial(len(some) * settings.run.rollouts_per_prompt, tokens, mean, first_token_s, sample_s, train_s)


def some_of(settings: Settings, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """As many as are worth the time."""
    return prompts[: max(1, MOST_ROLLOUTS // settings.run.rollouts_per_prompt)]


async def _trained(settings: Settings, trainer: Any, groups: Sequence[Group], memory: MemoryPlan) -> float:
    """Seconds of a step that is not the first, which compiles and allocates."""
    stepping, reference = with_reference(trainer, settings)
    try:
        batches = build_pack(settings, memory)(groups)
        await stepping.step(batches)
        started = time.perf_counter()
        await stepping.step(batches)
        return time.perf_counter() - started
    finally:
        if reference is not None:
            reference.close()


async def sampled(
    settings: Settings, engine: Engine, prompts: Sequence[Prompt], tokens: int
) -> tuple[float, list[Group]]:
    """Seconds, and groups as if half of each had been right. No token ends a rollout, so all have the same length."""
    seeds = tuple(range(1, settings.run.rollouts_per_prompt + 1))
    requests = [Request(prompt.ordinal, prompt.token_ids, seeds) for prompt in prompts]
    sampling = Sampling(tokens, settings.rollout.options.get("temperature", 1.0))
    started = time.perf_counter()
    answers = {answer.key: answer async for answer in engine.generate(requests, sampling)}
    seconds = time.perf_counter() - started
    return seconds, [_group(prompt, answers[prompt.ordinal]) for prompt in prompts]


def _group(prompt: Prompt, answer: Answer) -> Group:
    rollouts = tuple(
        Rollout(ids, logprobs, (1,) * len(ids), "length", "", 0, 0, index, 0, answer.digests[index])
        for index, (ids, logprobs) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True))
    )
    signs: Any = tuple(float(index % 2) for index in range(len(rollouts)))
    return Group(prompt, rollouts, rewards=signs, advantages=tuple(2 * sign - 1 for sign in signs))
