"""OpenAI's protocol on the same server, so that any of its clients can use the trained model.

    POST /v1/chat/completions   one answer or `n`; `stream`: server-sent events, one per answer, once it is complete
    GET  /v1/models             the one that is served

Fields that would change an answer and are not supported (tools, penalties, a grammar) are refused by name; fields that
only label the request are ignored. Logprobs are of the distribution that the answer was sampled from. A stream has one
piece of text per answer, not one per token; comments keep the connection alive until then.
"""

import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request as HttpRequest

from podium.errors import InputError
from podium.model.chat import render
from podium.records import Answer, Request, Sampling
from podium.server.door import Refusal
from podium.server.served import Served, failure
from podium.server.wire import (
    READ,
    PromptRequests,
    Text,
    check_requests,
    collected,
    cut_at_texts,
    explained,
    with_signs_of_life,
)
from podium.settings.contracts import Temperature

IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Labels of a request, which do not change an answer."""
NEUTRAL = {"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "top_logprobs": 0, "tools": []}
NEUTRAL |= {"response_format": {"type": "text"}, "parallel_tool_calls": True, "tool_choice": "none"}
"""Values that change nothing."""


class Part(BaseModel):
    model_config = ConfigDict(strict=True)
    type: Literal["text"]
    text: Text


class Turn(BaseModel):
    model_config = ConfigDict(strict=True)
    role: Annotated[str, Field(max_length=64)]
    content: Text | Annotated[list[Part], Field(max_length=256)]

    def plain(self) -> dict[str, str]:
        """`developer` is OpenAI's newer name of `system`, which chat templates do not know."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)
    include_usage: bool = False


Stop = Annotated[str, Field(min_length=1, max_length=256)]
Answers = AsyncGenerator[tuple[int, Answer]]


class Chat(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, max_length=256)]
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    temperature: Annotated[Temperature, Field(le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    logprobs: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @classmethod
    def parse(cls, body: bytes) -> "Chat":
        try:
            made = cls.model_validate_json(body)
        except ValidationError as error:
            where = error.errors()[0]["loc"]
            raise Refusal(400, explained(error.errors()), param=str(where[0]) if where else None) from None
        for name, value in (made.model_extra or {}).items():
            if value is not None and name not in IGNORED and NEUTRAL.get(name, ...) != value:
                raise Refusal(400, f"{name} is not supported here; leave it out", param=name[:64])
        if None not in (made.max_tokens, made.max_completion_tokens) and made.max_tokens != made.max_completion_tokens:
            raise Refusal(400, "max_tokens and max_completion_tokens differ; give one", param="max_tokens")
        return made

    def prompt(self, tokenizer: Any) -> tuple[int, ...]:
        try:
            return render(tokenizer, [turn.plain() for turn in self.messages])
        except InputError as error:
            raise Refusal(400, str(error), param="messages") from None

    def requests(self, prompt: tuple[int, ...], stop_ids: Sequence[int], room: int) -> list[Request]:
        """One per answer. `room`: tokens left in the context, the default for the longest answer."""
        seeds = [secrets.randbits(63) if self.seed is None else (self.seed + k) % (1 << 63) for k in range(self.n or 1)]
        longest = self.max_completion_tokens or self.max_tokens or room
        temperature = 1.0 if self.temperature is None else self.temperature
        top_p = None if self.top_p == 1 else self.top_p
        sampling = Sampling(longest, temperature, None, top_p, tuple(stop_ids))
        return PromptRequests.of(0, prompt, sampling, seeds).requests

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


def _logprobs(answer: Answer, tokenizer: Any) -> list[dict[str, Any]]:
    tokens = [tokenizer.decode([i]) for i in answer.token_ids]
    return [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(tokens, answer.logprobs, strict=True)
    ]


class OpenAi:
    """`name` is the model's name for clients; `count` is called with every answer."""

    def __init__(self, served: Served, name: str, count: Callable[[Answer], None]) -> None:
        self._served, self._name, self._count, self._started = served, name, count, int(time.time())

    def add_to(self, app: FastAPI) -> None:
        app.api_route("/v1/models", methods=READ)(self.models)
        app.api_route("/v1/models/{name:path}", methods=READ)(self.model)
        app.post("/v1/chat/completions")(self.chat)

    async def models(self) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def model(self, name: str) -> JSONResponse:
        self._check_name(name)
        return JSONResponse(self._card)

    async def chat(self, request: HttpRequest) -> Any:
        body = Chat.parse(await request.body())
        self._check_name(body.model)
        policy, context = self._served.policy, self._served.max_context_tokens
        prompt = body.prompt(policy.tokenizer)
        if not 0 < len(prompt) < context:
            raise Refusal(
                400, f"{len(prompt)} prompt tokens; the context has {context}", "messages", "context_length_exceeded"
            )
        requests = body.requests(prompt, policy.stop_ids, context - len(prompt))
        try:
            check_requests(self._served, (("request 0", request) for request in requests))
        except Refusal as refusal:
            raise Refusal(400, refusal.message, "max_tokens", "context_length_exceeded") from None
        answers = self._answers(body, requests)
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self._name}
        head["system_fingerprint"] = f"policy-version-{self._served.version}"
        if body.stream:
            events = with_signs_of_life(self._events(body, head, answers, len(prompt)), b": waiting\n\n")
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        made = sorted(await collected(request, answers), key=lambda item: item[0])
        return JSONResponse(self._whole(body, head, made, len(prompt)))

    async def _answers(self, body: Chat, requests: list[Request]) -> Answers:
        """Each with its index."""
        async with aclosing(self._served.answers(requests)) as answers:
            async for written in answers:
                answer = cut_at_texts(written.answer, self._served.policy.tokenizer, body.stops)
                self._count(answer)
                yield written.place, answer

    def _whole(
        self, body: Chat, head: dict[str, Any], made: list[tuple[int, Answer]], num_prompt: int
    ) -> dict[str, Any]:
        choices = [self._choice(body, *item) for item in made]
        for each in choices:
            each["message"] = {"role": "assistant", "content": each.pop("content"), "refusal": None}
        usage = _usage(num_prompt, sum(len(answer.token_ids) for _, answer in made))
        return {**head, "object": "chat.completion", "choices": choices, "usage": usage}

    async def _events(
        self, body: Chat, head: dict[str, Any], answers: Answers, num_prompt: int
    ) -> AsyncGenerator[bytes]:
        head = {**head, "object": "chat.completion.chunk"}
        written = 0
        try:
            async with aclosing(answers):
                async for item in answers:
                    written += len(item[1].token_ids)
                    each = self._choice(body, *item)
                    ended = {"index": each["index"], "delta": {}, "finish_reason": each.pop("finish_reason")}
                    each["delta"] = {"role": "assistant", "content": each.pop("content")}
                    yield _event({**head, "choices": [{**each, "finish_reason": None}]})
                    yield _event({**head, "choices": [ended]})
            if body.stream_options is not None and body.stream_options.include_usage:
                yield _event({**head, "choices": [], "usage": _usage(num_prompt, written)})
            yield b"data: [DONE]\n\n"
        except Exception as error:
            yield _event(failure(error).body("/v1/"))

    def _choice(self, body: Chat, index: int, answer: Answer) -> dict[str, Any]:
        """One answer: its text without the text that ended it, and why it ended."""
        tokenizer = self._served.policy.tokenizer
        text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        end = min((text.index(stop) for stop in body.stops if stop in text), default=len(text))
        logprobs = {"content": _logprobs(answer, tokenizer), "refusal": None} if body.logprobs else None
        return {"index": index, "content": text[:end], "logprobs": logprobs, "finish_reason": answer.finish_reason}

    def _check_name(self, name: str) -> None:
        if name != self._name:
            raise Refusal(404, f"the model served here is {self._name!r}", "model", "model_not_found")

    @property
    def _card(self) -> dict[str, Any]:
        return {"id": self._name, "object": "model", "created": self._started, "owned_by": "podium"}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, allow_nan=False).encode() + b"\n\n"


def _usage(num_prompt: int, num_written: int) -> dict[str, int]:
    total = num_prompt + num_written
    return {"prompt_tokens": num_prompt, "completion_tokens": num_written, "total_tokens": total}
