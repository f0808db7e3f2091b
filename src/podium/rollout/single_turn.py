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
from podium.model.thinking import decode_answer
from podium.records import Answer, Group, Prompt, Request, Rollout, Sampling
from podium.stages import Engine
from podium.temperature import Temperature, TopP


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
        temperature: Annotated[Temperature, Field(description="of the sampled distribution")] = 1.0,
        max_new_tokens: Annotated[int, Field(ge=1, description="longest answer, the stop token included")] = 256,
        top_k: Annotated[int, Field(ge=1)] | None = None,
        top_p: TopP | None = None,
        stop: Annotated[list[str], Field(description="texts of one token each that end an answer too")] = [],  # noqa: B006
        system: Annotated[str | None, Field(description="system message put before every prompt")] = None,
        max_retries: Annotated[
            int, Field(ge=0, description="times that a prompt is sent again after an engine failed at it")
        ] = 2,
    ) -> None:
        self._engine, self._tokenizer, self._vocabulary = engine, tokenizer, vocabulary
        self._rollouts_per_prompt, self._seed, self._purpose = rollouts_per_prompt, seed, purpose
        self._max_retries = max_retries
        extra = [i for text in stop for i in _single_ids(tokenizer, text)]
        self._sampling = Sampling(max_new_tokens, temperature, top_k, top_p, tuple(sorted({*stop_ids, *extra})))

    async def start(self, prompts: Sequence[Prompt]) -> AsyncIterator[Group]:
        """An engine that breaks off is asked again for what it owes. If it cannot answer one prompt, that group comes
        without rollouts: it is never trained, and counted. If it can answer none, the run ends."""
        waiting = {prompt.ordinal: prompt for prompt in prompts}
        breaks, complaints = 0, []
        while waiting:
            try:
                asked = [self._request(prompt) for prompt in waiting.values()]
                async for answer in self._engine.generate(asked, self._sampling):
                    if answer.key in waiting:  # an answer that comes twice counts once
                        group, complaint = await self._group(waiting.pop(answer.key), answer)
                        complaints += [complaint] if complaint else []
                        yield group
                if waiting:
                    raise EngineError(f"the engine left {len(waiting)} prompts unanswered, such as {min(waiting)}")
            except EngineError:
                breaks += 1
                if breaks > self._max_retries:
                    raise
        if prompts and len(complaints) == len(prompts):
            raise EngineError(f"no answer of the engine can be used: {complaints[0]}")

    def _request(self, prompt: Prompt) -> Request:
        return Request(prompt.ordinal, prompt.token_ids, self._seeds(prompt))

    def _seeds(self, prompt: Prompt) -> tuple[int, ...]:
        indices = range(self._rollouts_per_prompt)
        return tuple(rollout_seed(self._seed, self._purpose, prompt.ordinal, k) for k in indices)

    async def _group(self, prompt: Prompt, answer: Answer) -> tuple[Group, str | None]:
        """The group, whole or without rollouts; with a complaint if it is the latter."""
        for retries in range(self._max_retries + 1):
            try:
                check_answer(answer, self._rollouts_per_prompt, self._sampling, self._vocabulary)
                return Group(prompt, self._rollouts(answer, self._seeds(prompt)), num_retries=retries), None
            except EngineError as error:
                complaint = str(error)
            if retries < self._max_retries:
                async for again in self._engine.generate([self._request(prompt)], self._sampling):
                    answer = again
        return Group(prompt, (), num_retries=self._max_retries), complaint

    def _rollouts(self, answer: Answer, seeds: tuple[int, ...]) -> tuple[Rollout, ...]:
        return tuple(
            Rollout(
                token_ids=ids,
                rollout_logprobs=logprobs,
                loss_mask=(1,) * len(ids),
                finish_reason=reason,
                text=decode_answer(self._tokenizer, ids),
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


def _single_ids(tokenizer: Any, text: str) -> set[int]:
    """The tokens that write `text`. Some tokenizers have two: they put a space before a text's first word, so the
    token inside a text is another one than the token of the text alone."""
    alone, before, inside = (tokenizer.encode(part, add_special_tokens=False) for part in (text, "\n", f"\n{text}"))
    follows = inside[len(before) :] if inside[: len(before)] == before else []
    found = {ids[0] for ids in (alone, follows) if len(ids) == 1}
    if not found:
        raise InputError(f"rollout.stop: {text!r} is {len(alone)} tokens of this model; give texts of one token each")
    return found
