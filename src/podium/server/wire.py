"""The bodies of requests, with their bounds, and the records that they become.

`Generate` is for users: prompts, each with one or several answers. Podium's own client sends `Rollouts`
(remote/rollouts.py). Requests that no engine can answer are refused here.
"""

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.requests import Request as HttpRequest

from podium.errors import InputError
from podium.model.chat import render
from podium.records import Answer, PrefixGroup, Request, Sampling
from podium.remote.tasks import end_tasks
from podium.server.door import Refusal
from podium.server.served import Served, failure
from podium.settings.contracts import Temperature

T = TypeVar("T")
MAX_ROLLOUTS = 16_384
"""In one call."""
MAX_TEMPERATURE = 100.0
HEARTBEAT_S = 2.0
SEEDS = range(-(1 << 63), 1 << 63)

Id = Annotated[int, Field(ge=0, lt=1 << 31)]
Ids = Annotated[list[Id], Field(min_length=1)]
Seeds = Annotated[list[Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]], Field(min_length=1, max_length=1024)]
RunId = Annotated[str, Field(min_length=1, max_length=256)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class RunBody(Body):
    run: RunId | None = None
    """Who asks, where a run has claimed the engine."""


def _is_text(text: str) -> str:
    """JSON may contain a lone surrogate, which no tokenizer takes."""
    text.encode()
    return text


Text = Annotated[str, AfterValidator(_is_text)]


class Message(Body):
    role: Annotated[Text, Field(max_length=64)]
    content: Text


class PromptBody(Body):
    """One prompt of several."""

    key: Annotated[int, Field(ge=0, lt=1 << 63)]
    prompt_token_ids: Ids
    seeds: Seeds


class Generate(RunBody):
    """Several prompts in `requests`, or one as ids or as messages."""

    requests: Annotated[list[PromptBody], Field(min_length=1, max_length=4096)] | None = None
    prompt_token_ids: Ids | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=256)] | None = None
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    seeds: Seeds | None = None
    """One per rollout; by default random ones."""
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] = 256
    temperature: Annotated[Temperature, Field(le=MAX_TEMPERATURE)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    stop_token_ids: list[Id] | None = None
    """By default the model's own; an empty list: none."""
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16)] = []
    """Texts that end an answer; the token that completes one is the last token."""
    stream: bool = False

    def prompts(self, tokenizer: Any, stop_ids: Sequence[int]) -> list["PromptRequests"]:
        forms = [name for name in ("requests", "prompt_token_ids", "messages") if getattr(self, name) is not None]
        if len(forms) != 1:
            raise Refusal(422, "give one of requests, prompt_token_ids and messages")
        sampling = self._sampling(stop_ids)
        if self.requests is not None:
            if self.seeds is not None or self.n != 1:
                raise Refusal(422, "n and seeds stand in each of the requests")
            if len({each.key for each in self.requests}) != len(self.requests):
                raise Refusal(422, "requests: a key stands there twice")
            return [PromptRequests.of(each.key, each.prompt_token_ids, sampling, each.seeds) for each in self.requests]
        seeds = self.seeds or [secrets.randbits(63) for _ in range(self.n)]
        if self.n not in (1, len(seeds)):
            raise Refusal(422, f"n is {self.n} and there are {len(seeds)} seeds")
        return [PromptRequests.of(0, self.prompt_token_ids or self._rendered(tokenizer), sampling, seeds)]

    def _rendered(self, tokenizer: Any) -> Sequence[int]:
        try:
            return render(tokenizer, [message.model_dump() for message in self.messages or ()])
        except InputError as error:
            raise Refusal(422, f"messages: {error}") from None

    def _sampling(self, stop_ids: Sequence[int]) -> Sampling:
        stop = tuple(stop_ids if self.stop_token_ids is None else self.stop_token_ids)
        return Sampling(self.max_tokens, self.temperature, self.top_k, self.top_p, stop)


@dataclass(eq=False)
class PromptRequests:
    """A user's prompt: one request per answer, and the answers that have arrived."""

    key: int
    requests: list[Request]
    answers: list[Answer | None]

    _numbers = itertools.count()

    @classmethod
    def of(cls, key: int, token_ids: Sequence[int], sampling: Sampling, seeds: Sequence[int]) -> "PromptRequests":
        group = PrefixGroup(f"http/{next(cls._numbers)}", len(seeds))
        requests = [Request(tuple(token_ids), sampling, seed, group) for seed in seeds]
        return cls(key, requests, [None] * len(seeds))

    @property
    def is_whole(self) -> bool:
        return None not in self.answers

    def line(self, run: str | None) -> dict[str, Any]:
        """All its answers, in the form for the user."""
        answers = [answer for answer in self.answers if answer is not None]
        return {
            "key": self.key,
            "token_ids": [answer.token_ids for answer in answers],
            "logprobs": [answer.logprobs for answer in answers],
            "finish_reason": [answer.finish_reason for answer in answers],
            "policy_versions": [answer.policy_versions for answer in answers],
            "policy_version": max(answer.policy_versions[1] for answer in answers),
            "run": run,
        }


class Score(RunBody):
    token_ids: Annotated[list[Id], Field(min_length=2)]


class Reload(RunBody):
    id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\z")]
    """Name of a published folder directly under the server's root."""
    version: Annotated[int, Field(ge=0, lt=1 << 40)]
    in_flight: bool = False
    """Swap in the middle of answers, instead of waiting for their end."""


class ClaimBody(Body):
    run: RunId
    scope: Literal["run", "engine"]


class ReleaseBody(Body):
    run: RunId


Name = Annotated[str, Field(min_length=1, max_length=256)]


class Join(RunBody):
    master_address: Annotated[str, Field(pattern=r"^[A-Za-z0-9.:-]{1,253}\z")]
    master_port: Annotated[int, Field(ge=1, le=65535)]
    world_size: Annotated[int, Field(ge=2, le=4096)]
    rank_offset: Annotated[int, Field(ge=1, le=4096)]


class Receive(RunBody):
    names: Annotated[list[Name], Field(min_length=1, max_length=10_000)]
    dtype_names: list[Annotated[str, Field(pattern=r"^(float32|bfloat16|float16)\z")]]
    shapes: list[Annotated[list[Annotated[int, Field(ge=1, lt=1 << 40)]], Field(max_length=6)]]
    version: Annotated[int, Field(ge=0, lt=1 << 40)]


def check_requests(served: Served, named: Iterable[tuple[str, Request]]) -> None:
    """Refuses what no engine can answer, by the name of the request."""
    named = list(named)
    if len(named) > MAX_ROLLOUTS:
        raise Refusal(422, f"more than {MAX_ROLLOUTS} rollouts in one call")
    known: set[Any] = set()
    for name, request in named:
        kind = request.token_ids, request.sampling
        if kind not in known:  # requests of one prompt differ in their seeds only
            known.add(kind)
            _check_request(name, request, served.policy.vocabulary, served.max_context_tokens)
        if request.seed not in SEEDS:
            raise Refusal(422, f"{name}: the seed has more than 64 bits")


def _check_request(name: str, request: Request, vocabulary: int, max_context_tokens: int) -> None:
    check_ids(request.token_ids, vocabulary, name)
    sampling = request.sampling
    check_ids(sampling.stop_ids or (0,), vocabulary, "stop_token_ids")
    if sampling.max_new_tokens < 1 or not 0 <= sampling.temperature <= MAX_TEMPERATURE:
        raise Refusal(422, f"{name}: max_new_tokens is at least 1, temperature 0 to {MAX_TEMPERATURE:g}")
    if sampling.top_k is not None and not 1 <= sampling.top_k < 1 << 31:
        raise Refusal(422, f"{name}: top_k is at least 1")
    if sampling.top_p is not None and not 0 < sampling.top_p <= 1:
        raise Refusal(422, f"{name}: top_p is above 0 and at most 1")
    if len(request.token_ids) + sampling.max_new_tokens > max_context_tokens:
        raise Refusal(
            422,
            f"{name}: {len(request.token_ids)} prompt tokens and max_tokens = {sampling.max_new_tokens} are more than "
            f"the context of {max_context_tokens}",
        )


def check_ids(ids: Sequence[int], vocabulary: int, where: str) -> None:
    if not ids or min(ids) < 0 or max(ids) >= vocabulary:
        raise Refusal(422, f"{where}: there is no id, or an id is outside the vocabulary of {vocabulary}")


def cut_at_texts(answer: Answer, tokenizer: Any, texts: Sequence[str]) -> Answer:
    """The answer up to the token that completes one of the texts."""
    length = _length_to(tokenizer, answer.token_ids, texts) if texts else None
    if length is None:
        return answer
    ids, logprobs = answer.token_ids[:length], answer.logprobs[:length]
    return Answer(ids, logprobs, "stop", answer.policy_versions, answer.num_pauses)


def _length_to(tokenizer: Any, ids: Sequence[int], texts: Sequence[str]) -> int | None:
    """Number of tokens up to the one that completes a text. More tokens never remove a text, so bisection finds it."""

    def holds(length: int) -> bool:
        text = tokenizer.decode(ids[:length], skip_special_tokens=True)
        return any(each in text for each in texts)

    if not holds(len(ids)):
        return None
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def explained(errors: Sequence[Mapping[str, Any]]) -> str:
    """The first error: where and what, never the value."""
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    return f"{where}: {first['msg']}".removeprefix(": ")[:300]


READ = ["GET", "HEAD"]
"""Methods of a route that only reads. FastAPI does not add HEAD by itself."""


async def with_signs_of_life(items: AsyncGenerator[bytes], sign: bytes) -> AsyncGenerator[bytes]:
    """The items of a streamed answer; `sign` whenever none has come for a while."""
    async with aclosing(items):
        while True:
            coming = asyncio.ensure_future(anext(items, None))
            try:
                while not (await asyncio.wait([coming], timeout=HEARTBEAT_S))[0]:
                    yield sign
            finally:
                await end_tasks([coming])
            if (item := await coming) is None:
                return
            yield item


async def collected(request: HttpRequest, items: AsyncIterator[T]) -> list[T]:
    """All items. Cancels the work if the client goes away first."""

    async def collect() -> list[T]:
        return [item async for item in items]

    work, gone = asyncio.ensure_future(collect()), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise Refusal(503, "the client went away")
        return await work
    except Exception as error:
        raise failure(error) from None
    finally:
        await end_tasks((work, gone))
