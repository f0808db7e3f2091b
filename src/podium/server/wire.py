"""The bodies of requests, with their bounds, and what they ask in Podium's own records."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from podium.errors import InputError
from podium.model.chat import render
from podium.records import Answer, Request, Sampling
from podium.server.refusal import Refusal
from podium.temperature import Temperature

MAX_ROLLOUTS = 16_384
"""In one call."""

Id = Annotated[int, Field(ge=0, lt=1 << 31)]
Ids = Annotated[list[Id], Field(min_length=1)]
Seeds = Annotated[list[Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]], Field(min_length=1, max_length=1024)]
RunId = Annotated[str, Field(min_length=1, max_length=256)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _is_text(text: str) -> str:
    """A lone surrogate is JSON, and no text: no tokenizer takes it."""
    text.encode()
    return text


Text = Annotated[str, AfterValidator(_is_text)]


class Message(Body):
    role: Annotated[Text, Field(max_length=64)]
    content: Text


class Asked(Body):
    """One prompt of several."""

    key: Annotated[int, Field(ge=0, lt=1 << 63)]
    prompt_token_ids: Ids
    seeds: Seeds


class Generate(Body):
    """Several prompts in `requests`, or one as ids or as messages."""

    requests: Annotated[list[Asked], Field(min_length=1, max_length=4096)] | None = None
    prompt_token_ids: Ids | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=256)] | None = None
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    seeds: Seeds | None = None
    """One a rollout; by default random ones."""
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] = 256
    temperature: Annotated[Temperature, Field(le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    stop_token_ids: list[Id] | None = None
    """By default the model's own; an empty list: none."""
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16)] = []
    """Texts that end an answer; it is cut behind the token that completes one."""
    stream: bool = False
    run: RunId | None = None
    """Who asks, where a run has claimed the engine."""

    def asked(self, tokenizer: Any) -> list[Request]:
        forms = [name for name in ("requests", "prompt_token_ids", "messages") if getattr(self, name) is not None]
        if len(forms) != 1:
            raise Refusal(422, "give one of requests, prompt_token_ids and messages")
        if self.requests is not None:
            if self.seeds is not None or self.n != 1:
                raise Refusal(422, "n and seeds stand in each of the requests")
            if len({each.key for each in self.requests}) != len(self.requests):
                raise Refusal(422, "requests: a key stands there twice")
            return [Request(each.key, tuple(each.prompt_token_ids), tuple(each.seeds)) for each in self.requests]
        seeds = self.seeds or [secrets.randbits(63) for _ in range(self.n)]
        if self.n not in (1, len(seeds)):
            raise Refusal(422, f"n is {self.n} and there are {len(seeds)} seeds")
        return [Request(0, tuple(self.prompt_token_ids or self._rendered(tokenizer)), tuple(seeds))]

    def _rendered(self, tokenizer: Any) -> Sequence[int]:
        try:
            return render(tokenizer, [message.model_dump() for message in self.messages or ()])
        except InputError as error:
            raise Refusal(422, f"messages: {error}") from None

    def sampling(self, stop_ids: Sequence[int]) -> Sampling:
        stop = tuple(stop_ids if self.stop_token_ids is None else self.stop_token_ids)
        return Sampling(self.max_tokens, self.temperature, self.top_k, self.top_p, stop)


class Score(Body):
    token_ids: Annotated[list[Id], Field(min_length=2)]
    run: RunId | None = None


class Show(Body):
    run: RunId | None = None


class Reload(Body):
    id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\z")]
    """Name of a published folder right under the server's root."""
    version: Annotated[int, Field(ge=0, lt=1 << 40)]
    in_flight: bool = False
    """Swap at once, in the middle of answers, instead of letting them end first."""
    run: RunId | None = None


class ClaimBody(Body):
    run: RunId
    scope: Literal["run", "engine"]


class ReleaseBody(Body):
    run: RunId


def check_asked(asked: Sequence[Request], sampling: Sampling, vocabulary: int, max_context_tokens: int) -> None:
    """What no engine can answer is told at once, naming the request."""
    if sum(len(request.seeds) for request in asked) > MAX_ROLLOUTS:
        raise Refusal(422, f"more than {MAX_ROLLOUTS} rollouts in one call")
    if any(i >= vocabulary for i in sampling.stop_ids):
        raise Refusal(422, f"stop_token_ids: an id is outside the vocabulary of {vocabulary}")
    for request in asked:
        check_ids(request.token_ids, vocabulary, f"request {request.key}")
        total = len(request.token_ids) + sampling.max_new_tokens
        if total > max_context_tokens:
            raise Refusal(
                422,
                f"request {request.key}: {len(request.token_ids)} prompt tokens and max_tokens = "
                f"{sampling.max_new_tokens} are more than the context of {max_context_tokens}",
            )


def check_ids(ids: Sequence[int], vocabulary: int, where: str) -> None:
    if max(ids) >= vocabulary:
        raise Refusal(422, f"{where}: an id is outside the vocabulary of {vocabulary}")


def line_of(answer: Answer, run: str | None) -> dict[str, Any]:
    """One answer as it goes over the wire."""
    return {
        "key": answer.key,
        "token_ids": answer.token_ids,
        "logprobs": answer.logprobs,
        "finish_reason": answer.finish_reasons,
        "policy_versions": answer.policy_versions,
        "policy_version": max(last for _, last in answer.policy_versions),
        "run": run,
    }


def cut_at_texts(answer: Answer, tokenizer: Any, texts: Sequence[str]) -> Answer:
    """The answer with each rollout ended behind the token that completes one of the texts."""
    if not texts:
        return answer
    rollouts = []
    for ids, logprobs, reason in zip(answer.token_ids, answer.logprobs, answer.finish_reasons, strict=True):
        length = _length_to(tokenizer, ids, texts)
        rollouts.append((ids, logprobs, reason) if length is None else (ids[:length], logprobs[:length], "stop"))
    ids, logprobs, reasons = zip(*rollouts, strict=True)
    return Answer(answer.key, ids, logprobs, reasons, answer.policy_versions)


def _length_to(tokenizer: Any, ids: Sequence[int], texts: Sequence[str]) -> int | None:
    """Tokens up to the first that completes a text; more tokens never take a text away, so halving finds it."""

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
    """The first complaint: where and what, never the value."""
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    return f"{where}: {first['msg']}".removeprefix(": ")[:300]
