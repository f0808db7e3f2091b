"""One prompt, one answer: the rollout stage for questions that need no tools.

In: prompts. Out: groups of rollouts, by ordinal. Seeds come from (run seed, ordinal, sample index), so a prompt that
is sampled again, after a resume or a lost engine, gives the same rollouts.
"""

import hashlib
import math
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from podium.errors import EngineError, InputError
from podium.records import Answer, Group, Prompt, Request, Rollout, Sampling
from podium.stages import Engine


class SingleTurn:
    """`vocabulary` is the model's, which may be larger than the tokenizer's; `purpose` keeps the seeds of training and
    evaluation apart."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        stop_ids: Sequence[int],
        vocabulary: int,
        rollouts_per_prompt: int,
        seed: int,
        purpose: str = "train",
        *,
        temperature: Annotated[float, Field(ge=0, description="of the sampled distribution")] = 1.0,
        max_new_tokens: Annotated[int, Field(ge=1, description="longest answer, the stop token included")] = 256,
        top_k: Annotated[int, Field(ge=1)] | None = None,
        top_p: Annotated[float, Field(gt=0, le=1)] | None = None,
        stop: Annotated[list[str], Field(description="texts of one token each that end an answer too")] = [],  # noqa: B006
        system: Annotated[str | None, Field(description="system message put before every prompt")] = None,
    ) -> None:
        self._engine, self._tokenizer, self._vocabulary = engine, tokenizer, vocabulary
        self._rollouts_per_prompt, self._seed, self._purpose = rollouts_per_prompt, seed, purpose
        extra = [_single_id(tokenizer, text) for text in stop]
        self._sampling = Sampling(max_new_tokens, temperature, top_k, top_p, tuple(sorted({*stop_ids, *extra})))

    async def start(self, prompts: Sequence[Prompt]) -> AsyncIterator[Group]:
        by_ordinal = {prompt.ordinal: prompt for prompt in prompts}
        requests = [
            Request(
                prompt.ordinal,
                prompt.token_ids,
                tuple(
                    rollout_seed(self._seed, self._purpose, prompt.ordinal, k) for k in range(self._rollouts_per_prompt)
                ),
            )
            for prompt in prompts
        ]
        seeds = {request.key: request.seeds for request in requests}
        async for answer in self._engine.generate(requests, self._sampling):
            check_answer(answer, self._rollouts_per_prompt, self._sampling, self._vocabulary)
            yield Group(by_ordinal[answer.key], self._rollouts(answer, seeds[answer.key]))

    def _rollouts(self, answer: Answer, seeds: tuple[int, ...]) -> tuple[Rollout, ...]:
        return tuple(
            Rollout(
                token_ids=ids,
                rollout_logprobs=logprobs,
                loss_mask=(1,) * len(ids),
                finish_reason=reason,
                text=self._tokenizer.decode(ids, skip_special_tokens=True),
                policy_version_min=min(answer.policy_versions[index]),
                policy_version_max=max(answer.policy_versions[index]),
                sample_index=index,
                seed=seeds[index],
                digest=answer.digests[index],
            )
            for index, (ids, logprobs, reason) in enumerate(
                zip(answer.token_ids, answer.logprobs, answer.finish_reasons, strict=True)
            )
        )


def rollout_seed(seed: int, purpose: str, ordinal: int, sample_index: int) -> int:
    """63 bits that no other rollout of the run has."""
    text = f"{seed}/{purpose}/{ordinal}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def check_answer(answer: Answer, count: int, sampling: Sampling, vocabulary: int) -> None:
    """An answer that cannot be right is the engine's failure, never a rollout with reward 0."""
    lengths = [len(part) for part in (answer.token_ids, answer.logprobs, answer.finish_reasons, answer.policy_versions)]
    if lengths != [count] * 4:
        raise EngineError(
            f"prompt {answer.key}: asked for {count} rollouts, got {lengths} ids, logprobs, finish reasons, versions"
        )
    for ids, logprobs in zip(answer.token_ids, answer.logprobs, strict=True):
        if not 1 <= len(ids) <= sampling.max_new_tokens or len(ids) != len(logprobs):
            raise EngineError(f"prompt {answer.key}: {len(ids)} ids with {len(logprobs)} logprobs in one rollout")
        if not all(0 <= i < vocabulary for i in ids):
            raise EngineError(f"prompt {answer.key}: an id outside the vocabulary of {vocabulary}")
        if not all(math.isfinite(value) and value <= 1e-6 for value in logprobs):
            raise EngineError(f"prompt {answer.key}: a logprob that is no finite number of at most 0")


def _single_id(tokenizer: Any, text: str) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise InputError(f"rollout.stop: {text!r} is {len(ids)} tokens of this model; give texts of one token each")
    return ids[0]
