"""One prompt, one answer: the rollout stage for questions that need no tools.

In: prompts. Out: groups of rollouts. Each rollout is a request of its own, and the stage makes groups of the answers.
Seeds come from (run seed, ordinal, sample index), so a prompt that is sampled again, after a resume or a lost engine,
gives the same rollouts.
"""

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Annotated, Any

from pydantic import Field

from podium.errors import EngineError, InputError
from podium.model.chat import decode_answer
from podium.records import Answer, Group, PrefixGroup, Prompt, Request, Rollout, Sampling
from podium.settings.contracts import Temperature
from podium.stages import Engine

MAX_RETRIES = 2
"""Times that a rollout is sent again after the engine failed at it. A rollout that fails three times fails for good."""


class SingleTurn:
    """`vocabulary` is the model's, which may be larger than the tokenizer's; `purpose` keeps the seeds of training and
    evaluation apart. `top_k` and `top_p` are for evaluation: trained rollouts come from the whole distribution."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        stop_ids: Sequence[int],
        vocabulary: int,
        rollouts_per_prompt: int,
        seed: int,
        purpose: str = "train",
        top_k: int | None = None,
        top_p: float | None = None,
        max_retries: int = MAX_RETRIES,
        *,
        temperature: Annotated[Temperature, Field(description="sampling temperature")] = 1.0,
        max_new_tokens: Annotated[
            int, Field(ge=1, description="longest answer in tokens, including the stop token")
        ] = 256,
        stop: Annotated[list[str], Field(description="further texts that end an answer; one token each")] = [],  # noqa: B006
        system: Annotated[str | None, Field(description="system message before every prompt")] = None,
    ) -> None:
        self._engine, self._tokenizer, self._vocabulary = engine, tokenizer, vocabulary
        self._rollouts_per_prompt, self._seed, self._purpose = rollouts_per_prompt, seed, purpose
        self._max_retries = max_retries
        extra = [i for text in stop for i in _single_ids(tokenizer, text)]
        self._sampling = Sampling(max_new_tokens, temperature, top_k, top_p, tuple(sorted({*stop_ids, *extra})))

    async def start(self, prompts: Sequence[Prompt]) -> AsyncIterator[Group]:
        """Sends every rollout of the prompts at once and yields each group when all its rollouts are there.

        Groups come by ordinal if the engine keeps order, otherwise in the order in which they became whole, however
        late they are asked for. A group whose rollouts the engine cannot write comes without rollouts: it is never
        trained, and counted. If no prompt of the call gets a usable answer, the run ends.
        """
        missing = {prompt.ordinal: prompt for prompt in sorted(prompts, key=lambda each: each.ordinal)}
        rollouts: list[asyncio.Task[Outcome]] = []
        groups: list[asyncio.Task[tuple[Group, str]]] = []
        for prompt in missing.values():
            own = [asyncio.create_task(self._rollout(prompt, index)) for index in range(self._rollouts_per_prompt)]
            groups.append(asyncio.create_task(_group(prompt, own)))
            rollouts += own
        keeps_order, arrived = self._engine.traits.keeps_order, dict[int, Group]()
        failures: list[str] = []
        try:
            for next_group in asyncio.as_completed(groups):
                group, failure = await next_group
                arrived[group.prompt.ordinal] = group
                failures += [failure] if failure else []
                for ordinal in list(takewhile(arrived.__contains__, missing) if keeps_order else arrived):
                    del missing[ordinal]
                    yield arrived.pop(ordinal)
        finally:
            for task in (*rollouts, *groups):
                task.cancel()
            await asyncio.gather(*rollouts, *groups, return_exceptions=True)
            for prompt in missing.values():
                self._engine.release(self._name(prompt))
        if prompts and len(failures) == len(prompts):
            raise EngineError(f"no answer of the engine can be used: {failures[0]}")

    def _name(self, prompt: Prompt) -> str:
        return f"{self._purpose}/{prompt.ordinal}"

    async def _rollout(self, prompt: Prompt, index: int) -> "Outcome":
        """One rollout. A call that fails is repeated, and so is one whose answer cannot be right."""
        group = PrefixGroup(self._name(prompt), self._rollouts_per_prompt)
        seed = rollout_seed(self._seed, self._purpose, prompt.ordinal, index)
        answer, num_retries, fault = await self._asked(prompt, Request(prompt.token_ids, self._sampling, seed, group))
        if answer is None:
            return Outcome(None, num_retries, failure=f"{prompt.label}: {fault}")
        return Outcome(self._made(answer, index, seed), num_retries, answer.num_pauses)

    async def _asked(self, prompt: Prompt, request: Request) -> tuple[Answer | None, int, str]:
        """The engine's answer, how often it was asked again, and why there is none."""
        num_breaks = num_retries = 0
        while True:
            try:
                answer = await self._engine.generate(request)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                raise EngineError(f"{prompt.label}: the engine gave up a request that nobody cancelled") from error
            except EngineError:
                num_breaks += 1
                if num_breaks > self._max_retries:
                    raise
            else:
                fault = answer_fault(answer, request.sampling, self._vocabulary)
                if fault is None:
                    return answer, num_retries, ""
                if num_retries == self._max_retries:
                    return None, num_retries, fault
                num_retries += 1
            request = replace(request, prefix_group=None)  # the engine counts the requests of a group

    def _made(self, answer: Answer, index: int, seed: int) -> Rollout:
        return Rollout(
            token_ids=answer.token_ids,
            rollout_logprobs=answer.logprobs,
            loss_mask=(1,) * len(answer.token_ids),
            finish_reason=answer.finish_reason,
            text=decode_answer(self._tokenizer, answer.token_ids),
            policy_version_min=min(answer.policy_versions),
            policy_version_max=max(answer.policy_versions),
            sample_index=index,
            seed=seed,
            digest=answer.digest,
        )


@dataclass(frozen=True)
class Outcome:
    """What became of one rollout."""

    rollout: Rollout | None
    num_retries: int
    """Times that it was asked for again because an answer could not be right."""
    num_pauses: int = 0
    """Times that the engine paused it."""
    failure: str = ""
    """Why there is no rollout."""
    prompt: Prompt | None = None
    """With what the environment added to the row; None: as the data rendered it."""


async def _group(prompt: Prompt, rollouts: Sequence[Awaitable[Outcome]]) -> tuple[Group, str]:
    """The whole group, or one without rollouts and why."""
    outcomes = await asyncio.gather(*rollouts)
    num_retries = max(outcome.num_retries for outcome in outcomes)
    failure = next((outcome.failure for outcome in outcomes if outcome.failure), "")
    made = () if failure else tuple(outcome.rollout for outcome in outcomes if outcome.rollout is not None)
    num_pauses = sum(outcome.num_pauses for outcome in outcomes)
    opened = next((outcome.prompt for outcome in outcomes if outcome.prompt is not None), prompt)
    reason = "the environment began this episode with another message than the first of its group"
    pairs = [(each, (outcome.prompt or prompt).token_ids) for each, outcome in zip(made, outcomes, strict=False)]
    made = tuple(
        replace(each, failure=each.failure or reason) if ids != opened.token_ids else each for each, ids in pairs
    )
    return Group(opened, made, num_retries=num_retries, num_pauses=num_pauses), failure


def rollout_seed(seed: int, purpose: str, ordinal: int, sample_index: int, turn: int = 0) -> int:
    """63 bits that no other rollout of the run has; each later turn of an episode has its own."""
    text = f"{seed}/{purpose}/{ordinal}/{sample_index}{f'/{turn}' if turn else ''}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def answer_fault(answer: Answer, sampling: Sampling, vocabulary: int) -> str | None:
    """Why an answer cannot be right. Such an answer is the engine's failure, never a rollout with reward 0."""
    ids, logprobs = answer.token_ids, answer.logprobs
    if not 1 <= len(ids) <= sampling.max_new_tokens or len(ids) != len(logprobs):
        return f"{len(ids)} ids with {len(logprobs)} logprobs, where {sampling.max_new_tokens} tokens are allowed"
    if not all(0 <= i < vocabulary for i in ids):
        return f"an id outside the vocabulary of {vocabulary}"
    if not all(math.isfinite(value) and value <= 1e-6 for value in logprobs):
        return "a logprob that is no finite number of at most 0"
    return None


def _single_ids(tokenizer: Any, text: str) -> set[int]:
    """The tokens that write `text`. Some tokenizers have two: they put a space before a text's first word, so the
    token inside a text is another one than the token of the text alone."""
    alone, before, inside = (tokenizer.encode(part, add_special_tokens=False) for part in (text, "\n", f"\n{text}"))
    follows = inside[len(before) :] if inside[: len(before)] == before else []
    found = {ids[0] for ids in (alone, follows) if len(ids) == 1}
    if not found:
        raise InputError(f"rollout.stop: {text!r} is {len(alone)} tokens of this model; give texts of one token each")
    return found
