"""The HTTP engine: ids in, ids and logprobs out, weights by id.

    POST /generate        prompts in, answers out; `stream`: a line of JSON a prompt, as soon as it is whole
    POST /score           logprobs of given tokens
    POST /held            checksums of the weights that the engine samples with
    POST /reload_weights  a published folder under the root becomes what is served
    POST /join_transfer /receive_weights  weights from GPU to GPU (transfer.py)
    POST /claim /release  which run owns the weights
    GET  /info /metrics /health
    /v1/…                 OpenAI's protocol (openai.py)

Every answer carries the version of its weights and the run that owns them. Only /health is open without the token.
"""

import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from podium.errors import WeightsError
from podium.model.fingerprint import tokenizer_fingerprint
from podium.records import Answer
from podium.server.auth import Door
from podium.server.metrics import Metrics
from podium.server.openai import OpenAi
from podium.server.refusal import Refusal
from podium.server.served import Served, failure
from podium.server.transfer import Transfer, transfer_ranks
from podium.server.waiting import READ, unless_gone
from podium.server.wire import (
    ClaimBody,
    Generate,
    ReleaseBody,
    Reload,
    Score,
    Show,
    check_asked,
    check_ids,
    cut_at_texts,
    explained,
    line_of,
)

Log = Callable[[str], None]


def make_app(served: Served, token: bytes | None, engine_name: str, log: Log, model_name: str = "policy") -> Door:
    """`token`: hash of the one that opens (auth.digest), or None on a private socket. `model_name` is what OpenAI's
    clients call the model."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    routes = _Routes(served, engine_name, log)
    for path, answer in (("/health", routes.health), ("/info", routes.info), ("/metrics", routes.metrics_text)):
        app.api_route(path, methods=READ)(answer)
    app.post("/generate")(routes.generate)
    app.post("/score")(routes.score)
    app.post("/held")(routes.held)
    app.post("/reload_weights")(routes.reload_weights)
    app.post("/claim")(routes.claim)
    app.post("/release")(routes.release)
    Transfer(served).add_to(app)
    OpenAi(served, model_name, lambda: routes.max_context_tokens, routes.count).add_to(app)
    app.exception_handler(Refusal)(_refused)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(RequestValidationError)(_not_valid)
    routes.metrics = Metrics(served, frozenset(route.path for route in app.routes))  # type: ignore[attr-defined]
    return Door(app, token, routes.metrics.count, log)


class _Routes:
    metrics: Metrics

    def __init__(self, served: Served, engine_name: str, log: Log) -> None:
        self._served, self._engine_name, self._log = served, engine_name, log
        self._fingerprint = tokenizer_fingerprint(served.policy.tokenizer)

    async def health(self) -> JSONResponse:
        self._served.check_alive()
        return JSONResponse({"status": "ok"})

    async def info(self) -> JSONResponse:
        served = self._served
        return JSONResponse(
            {
                "engine": self._engine_name,
                "vocabulary": served.policy.vocabulary,
                "tokenizer": self._fingerprint,
                "dtype": getattr(served.engine, "dtype", str(served.policy.model.dtype).removeprefix("torch.")),
                "max_context_tokens": self.max_context_tokens,
                "weights_root": str(served.root),
                "transfer_ranks": transfer_ranks(served),
                "policy_version": served.version,
                "run": served.run,
                "claimed_by": served.claims.run,
                "pid": os.getpid(),
            }
        )

    async def metrics_text(self) -> PlainTextResponse:
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def generate(self, body: Generate, request: HttpRequest) -> Any:
        served, tokenizer = self._served, self._served.policy.tokenizer
        served.claims.check(body.run)
        asked, sampling = body.asked(tokenizer), body.sampling(served.policy.stop_ids)
        check_asked(asked, sampling, served.policy.vocabulary, self.max_context_tokens)
        lines = self._lines(body, asked, sampling)
        if body.stream:
            return StreamingResponse(_streamed(lines), media_type="application/x-ndjson")
        answers = await unless_gone(request, _collected(lines))
        if body.requests is not None:
            return JSONResponse({"answers": answers})
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers[0]["token_ids"]]
        return JSONResponse({**answers[0], "text": texts})

    async def _lines(self, body: Generate, asked: Any, sampling: Any) -> AsyncIterator[dict[str, Any] | None]:
        """None: nothing new, all is well."""
        started = time.monotonic()
        async with aclosing(self._served.answers(asked, sampling)) as answers:
            async for item in answers:
                if item is None:
                    yield None
                    continue
                answer, run = item
                answer = cut_at_texts(answer, self._served.policy.tokenizer, body.stop)
                self.count(answer)
                yield line_of(answer, run)
        self.metrics.seconds.observe(time.monotonic() - started)

    def count(self, answer: Answer) -> None:
        self.metrics.rollouts.inc(len(answer.token_ids))
        self.metrics.tokens.inc(sum(map(len, answer.token_ids)))

    async def score(self, body: Score) -> JSONResponse:
        self._served.claims.check(body.run)
        check_ids(body.token_ids, self._served.policy.vocabulary, "token_ids")
        if len(body.token_ids) > self.max_context_tokens - 1:
            raise Refusal(422, f"token_ids: more than the context of {self.max_context_tokens} allows")
        try:
            return JSONResponse(await self._served.score(body.token_ids))
        except Exception as error:
            raise failure(error) from None

    async def held(self, body: Show) -> JSONResponse:
        self._served.claims.check(body.run)
        try:
            return JSONResponse(await self._served.held())
        except Exception as error:
            raise failure(error) from None

    async def reload_weights(self, body: Reload) -> JSONResponse:
        try:
            sha256 = await self._served.reload(body.id, body.version, body.in_flight, body.run)
        except Exception as error:
            self.metrics.reloads.labels("refused").inc()
            refusal = Refusal(422, str(error)) if isinstance(error, WeightsError) else failure(error)
            refusal.message = refusal.message.replace(str(self._served.root), "")
            self._log(f"weights {body.id} refused: {refusal.message}")
            raise refusal from None
        self.metrics.reloads.labels("taken").inc()
        self._log(f"weights {body.id}: version {body.version} of run {body.run}")
        return JSONResponse({"version": body.version, "sha256": sha256})

    async def claim(self, body: ClaimBody) -> JSONResponse:
        self._served.claim(body.run, body.scope)
        return JSONResponse({"run": body.run, "scope": body.scope})

    async def release(self, body: ReleaseBody) -> JSONResponse:
        self._served.release(body.run)
        return JSONResponse({"run": body.run})

    @property
    def max_context_tokens(self) -> int:
        own = getattr(self._served.engine, "max_context_tokens", None)
        return own or self._served.policy.max_context_tokens


async def _collected(lines: AsyncIterator[dict[str, Any] | None]) -> list[dict[str, Any]]:
    try:
        return [line async for line in lines if line is not None]
    except Exception as error:
        raise failure(error) from None


async def _streamed(lines: AsyncIterator[dict[str, Any] | None]) -> AsyncIterator[bytes]:
    """A stream that breaks ends with a line that says so; an empty line only shows that somebody is there."""
    try:
        async with aclosing(lines):  # type: ignore[type-var]
            async for line in lines:
                yield b"\n" if line is None else json.dumps(line, allow_nan=False).encode() + b"\n"
    except Exception as error:
        yield json.dumps(failure(error).body).encode() + b"\n"


async def _refused(request: HttpRequest, error: Any) -> JSONResponse:
    return JSONResponse(error.body_at(request.url.path), error.status)


async def _http_error(request: HttpRequest, error: Any) -> JSONResponse:
    return JSONResponse(Refusal(error.status_code, str(error.detail)).body_at(request.url.path), error.status_code)


async def _not_valid(_: HttpRequest, error: Any) -> JSONResponse:
    return JSONResponse({"error": explained(error.errors())}, 422)
