"""OpenAI's protocol on the same server, so that any client can talk to what was trained.

    POST /v1/chat/completions   one answer or `n`; `stream`: server-sent events, an answer each, as soon as it is whole
    GET  /v1/models             the one that is served

Logprobs are of the distribution that was sampled from. An engine gives whole answers, so a stream has one piece of text
for each answer, not one for each token; comments keep the connection alive until then.
"""

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import Request as HttpRequest

from podium.records import Answer, Request, Sampling
from podium.server._chat import Chat, choice
from podium.server.refusal import Refusal
from podium.server.served import Served, failure
from podium.server.waiting import READ, unless_gone
from podium.server.wire import check_asked, cut_at_texts


class OpenAi:
    """`name` is the model's for clients; `counted` is told of every answer."""

    def __init__(
        self, served: Served, name: str, max_context_tokens: Callable[[], int], counted: Callable[[Answer], None]
    ) -> None:
        self._served, self._name, self._counted = served, name, counted
        self._max_context_tokens, self._started = max_context_tokens, int(time.time())

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
        try:
            body = Chat.parse(await request.json())
        except ValueError:
            raise Refusal(400, "the body is not JSON") from None
        self._check_name(body.model)
        policy, context = self._served.policy, self._max_context_tokens()
        prompt = body.prompt(policy.tokenizer)
        if not 0 < len(prompt) < context:
            raise Refusal(
                400, f"{len(prompt)} prompt tokens; the context has {context}", "messages", "context_length_exceeded"
            )
        sampling = body.sampling(policy.stop_ids, context - len(prompt))
        asked = body.requests(prompt)
        try:
            check_asked(asked, sampling, policy.vocabulary, context)
        except Refusal as refusal:
            raise Refusal(400, refusal.message, "max_tokens", "context_length_exceeded") from None
        answers = self._answers(body, asked, sampling)
        head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": self._name}
        head["system_fingerprint"] = f"policy-version-{self._served.version}"
        if body.stream:
            events = self._events(body, head, answers, len(prompt))
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        return JSONResponse(await unless_gone(request, self._whole(body, head, answers, len(prompt))))

    async def _answers(self, body: Chat, asked: list[Request], sampling: Sampling) -> AsyncIterator[Answer | None]:
        """None: nothing new, all is well."""
        async with aclosing(self._served.answers(asked, sampling)) as answers:
            async for item in answers:
                answer = None if item is None else cut_at_texts(item[0], self._served.policy.tokenizer, body.stops)
                if answer is not None:
                    self._counted(answer)
                yield answer

    async def _whole(
        self, body: Chat, head: dict[str, Any], answers: AsyncIterator[Answer | None], num_prompt: int
    ) -> dict[str, Any]:
        try:
            made = [answer async for answer in answers if answer is not None]
        except Exception as error:
            raise failure(error) from None
        choices = [self._choice(body, answer) for answer in sorted(made, key=lambda answer: answer.key)]
        for each in choices:
            each["message"] = {"role": "assistant", "content": each.pop("content"), "refusal": None}
        usage = _usage(num_prompt, sum(len(answer.token_ids[0]) for answer in made))
        return {**head, "object": "chat.completion", "choices": choices, "usage": usage}

    async def _events(
        self, body: Chat, head: dict[str, Any], answers: AsyncIterator[Answer | None], num_prompt: int
    ) -> AsyncIterator[bytes]:
        head = {**head, "object": "chat.completion.chunk"}
        written = 0
        try:
            async with aclosing(answers):  # type: ignore[type-var]
                async for answer in answers:
                    if answer is None:
                        yield b": waiting\n\n"
                        continue
                    written += len(answer.token_ids[0])
                    each = self._choice(body, answer)
                    ended = {"index": each["index"], "delta": {}, "finish_reason": each.pop("finish_reason")}
                    each["delta"] = {"role": "assistant", "content": each.pop("content")}
                    yield _event({**head, "choices": [{**each, "finish_reason": None}]})
                    yield _event({**head, "choices": [ended]})
            if body.stream_options is not None and body.stream_options.include_usage:
                yield _event({**head, "choices": [], "usage": _usage(num_prompt, written)})
            yield b"data: [DONE]\n\n"
        except Exception as error:
            yield _event(failure(error).openai_body)

    def _choice(self, body: Chat, answer: Answer) -> dict[str, Any]:
        return choice(answer, self._served.policy.tokenizer, body.stops, bool(body.logprobs))

    def _check_name(self, name: str) -> None:
        if name != self._name:
            raise Refusal(404, f"the model served here is {self._name!r}", "model", "model_not_found")

    @property
    def _card(self) -> dict[str, Any]:
        return {"id": self._name, "object": "model", "created": self._started, "owned_by": "podium"}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, allow_nan=False).encode() + b"\n\n"


def _usage(num_prompt: int, num_written: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_written,
        "total_tokens": num_prompt + num_written,
    }
