"""The HTTP engine: token ids in, token ids and logprobs out, weights by id.

    POST /generate        prompts in, answers out; `stream`: a line of JSON per prompt, as soon as it is whole
    POST /rollouts        Podium's own client: single rollouts in, a line of JSON per answer out
    POST /score           logprobs of given tokens
    POST /held            checksums of the weights that the engine samples with
    POST /reload_weights  a published folder under the root becomes what is served
    POST /join_transfer   meets the trainer, once, for weights that travel from GPU to GPU (sync/nccl.py)
    POST /receive_weights takes the weights that the trainer broadcasts at the same time
    POST /claim /release  which run owns the weights
    GET  /info /metrics /health
    /v1/…                 OpenAI's protocol (openai.py)

Every answer contains the version of its weights and the run that owns them. Only /health is open without the token.
"""

import json
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from podium.errors import CodecError, WeightsError
from podium.model.chat import tokenizer_fingerprint
from podium.model.evidence import Held
from podium.model.handoff import in_saved_format
from podium.records import Answer, Request
from podium.remote.codec import from_json, to_plain
from podium.remote.rollouts import Rollouts, Written
from podium.server.door import Door, Refusal
from podium.server.openai import OpenAi
from podium.server.served import Served, failure
from podium.server.wire import (
    READ,
    ClaimBody,
    Generate,
    Join,
    PromptRequests,
    Receive,
    ReleaseBody,
    Reload,
    RunBody,
    Score,
    check_ids,
    check_requests,
    collected,
    cut_at_texts,
    explained,
    with_signs_of_life,
)

POSTED = ("generate", "rollouts", "score", "held", "reload_weights", "join_transfer", "receive_weights")
POSTED += ("claim", "release")
Log = Callable[[str], None]
Lines = AsyncGenerator[dict[str, Any]]


def make_app(served: Served, token: bytes | None, engine_name: str, log: Log, model_name: str = "policy") -> Door:
    """`token`: hash of the valid token (`door.digest`), or None on a private socket. `model_name` is the model's name
    for OpenAI's clients."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    routes = _Routes(served, engine_name, log)
    for path, answer in (("/health", routes.health), ("/info", routes.info), ("/metrics", routes.metrics_text)):
        app.api_route(path, methods=READ)(answer)
    for name in POSTED:
        app.post(f"/{name}")(getattr(routes, name))
    OpenAi(served, model_name, routes.count).add_to(app)
    for kind in (Refusal, HTTPException, RequestValidationError):
        app.exception_handler(kind)(_refused)
    known = {route.path for route in app.routes}  # type: ignore[attr-defined]

    def count(path: str, status: int) -> None:
        routes.metrics.requests.labels(path if path in known else "other", status).inc()

    return Door(app, token, count, log)


SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """What the server counts, for Prometheus."""

    def __init__(self, served: Served) -> None:
        self.registry = CollectorRegistry()
        ours: dict[str, Any] = {"namespace": "podium", "registry": self.registry}
        self.requests = Counter("requests", "Answered requests; 499: client went away.", ("route", "status"), **ours)
        self.rollouts = Counter("rollouts", "Rollouts written.", **ours)
        self.tokens = Counter("tokens", "Tokens written.", **ours)
        self.reloads = Counter("reloads", "New weights, taken or refused.", ("result",), **ours)
        self.seconds = Histogram("generate_seconds", "Whole /generate calls.", buckets=SECONDS, **ours)
        Gauge("running", "Calls that the engine works on.", **ours).set_function(lambda: served.gate.running)
        Gauge("waiting", "Calls that wait for the engine.", **ours).set_function(lambda: served.gate.waiting)
        Gauge("policy_version", "Of the weights that are served.", **ours).set_function(lambda: served.version)


class _Routes:
    def __init__(self, served: Served, engine_name: str, log: Log) -> None:
        self._served, self._engine_name, self._log = served, engine_name, log
        self.metrics = Metrics(served)

    @cached_property
    def _fingerprint(self) -> dict[str, str]:
        return tokenizer_fingerprint(self._served.policy.tokenizer)

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
                "dtype": served.engine.traits.dtype,
                "max_context_tokens": served.max_context_tokens,
                "weights_root": str(served.root),
                "transfer_ranks": served.engine.traits.transfer_ranks,
                "policy_version": served.version,
                "run": served.run,
                "claimed_by": served.claims.run,
                "pid": os.getpid(),
            }
        )

    async def metrics_text(self) -> PlainTextResponse:
        text = generate_latest(self.metrics.registry)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def generate(self, body: Generate, request: HttpRequest) -> Any:
        served, tokenizer = self._served, self._served.policy.tokenizer
        served.claims.check(body.run)
        prompts = body.prompts(tokenizer, served.policy.stop_ids)
        check_requests(served, ((f"request {prompt.key}", each) for prompt in prompts for each in prompt.requests))
        lines = self._prompt_lines(prompts, body.stop)
        if body.stream:
            return _streamed(lines)
        answers = await collected(request, lines)
        if body.requests is not None:
            return JSONResponse({"answers": answers})
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers[0]["token_ids"]]
        return JSONResponse({**answers[0], "text": texts})

    async def rollouts(self, request: HttpRequest) -> StreamingResponse:
        try:
            body = from_json(Rollouts, await request.body())
            requests = list(body.whole())
        except CodecError as error:
            raise Refusal(422, f"the body is not that of /rollouts: {error}"[:300]) from None
        self._served.claims.check(body.run)
        check_requests(self._served, ((each.label, each) for each in requests))
        return _streamed(to_plain(written) async for written in self._written(requests))

    async def _prompt_lines(self, prompts: list[PromptRequests], stop: Sequence[str]) -> Lines:
        """A line per prompt, once all of its answers are complete."""
        owners = [(prompt, sample) for prompt in prompts for sample in range(len(prompt.requests))]
        requests = [request for prompt in prompts for request in prompt.requests]
        async with aclosing(self._written(requests)) as answers:
            async for written in answers:
                prompt, sample = owners[written.place]
                prompt.answers[sample] = cut_at_texts(written.answer, self._served.policy.tokenizer, stop)
                if prompt.is_whole:
                    yield prompt.line(written.run)

    async def _written(self, requests: list[Request]) -> AsyncGenerator[Written]:
        started = time.monotonic()
        async with aclosing(self._served.answers(requests)) as answers:
            async for written in answers:
                self.count(written.answer)
                yield written
        self.metrics.seconds.observe(time.monotonic() - started)

    def count(self, answer: Answer) -> None:
        self.metrics.rollouts.inc()
        self.metrics.tokens.inc(len(answer.token_ids))

    async def score(self, body: Score) -> JSONResponse:
        self._served.claims.check(body.run)
        check_ids(body.token_ids, self._served.policy.vocabulary, "token_ids")
        if len(body.token_ids) > self._served.max_context_tokens - 1:
            raise Refusal(422, f"token_ids: more than the context of {self._served.max_context_tokens} allows")
        try:
            return JSONResponse(await self._served.score(body.token_ids))
        except Exception as error:
            raise failure(error) from None

    async def held(self, body: RunBody) -> JSONResponse:
        self._served.claims.check(body.run)
        try:
            shown = await self._served.held()
        except Exception as error:
            raise failure(error) from None
        return JSONResponse(shown | {"held": to_plain(shown["held"], Held | None)})

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

    async def join_transfer(self, body: Join) -> JSONResponse:
        engine = self._receiver(body.run)
        await engine.join_transfer(body.model_dump(exclude={"run"}))
        return JSONResponse({"ranks": engine.traits.transfer_ranks})

    async def receive_weights(self, body: Receive) -> JSONResponse:
        """HTTP carries names, types and shapes only. They are checked first: the tensors overwrite the served ones."""
        engine, policy = self._receiver(body.run), self._served.policy
        if not len(body.names) == len(body.shapes) == len(body.dtype_names):
            raise Refusal(422, "names, dtype_names and shapes must have one entry per tensor")
        saved = in_saved_format(policy.model, policy.named_weights())
        if dict(zip(body.names, body.shapes, strict=True)) != {name: list(tensor.shape) for name, tensor in saved}:
            raise Refusal(422, "the tensors are not those of the model that is served")
        update = body.model_dump(include={"names", "dtype_names", "shapes"})
        await self._served.take_transfer(lambda: engine.receive_weights(update, body.version), body.run)
        return JSONResponse({"version": body.version})

    def _receiver(self, run: str | None) -> Any:
        """The engine, if it can take weights from GPU to GPU: it has GPUs of its own and serves full weights."""
        self._served.claims.check_writer(run)
        if not self._served.engine.traits.transfer_ranks:
            raise Refusal(422, "this engine takes no weights by NCCL; hand them over by folder")
        return self._served.engine

    async def claim(self, body: ClaimBody) -> JSONResponse:
        self._served.claims.take(body.run, body.scope)
        return JSONResponse({"run": body.run, "scope": body.scope})

    async def release(self, body: ReleaseBody) -> JSONResponse:
        self._served.release(body.run)
        return JSONResponse({"run": body.run})


def _streamed(lines: Lines) -> StreamingResponse:
    """A line of JSON each; an empty line is a sign of life. A stream that fails ends with a line that says why."""

    async def encoded() -> AsyncGenerator[bytes]:
        try:
            async with aclosing(lines):
                async for line in lines:
                    yield json.dumps(line, allow_nan=False).encode() + b"\n"
        except Exception as error:
            yield json.dumps(failure(error).body("/generate")).encode() + b"\n"

    return StreamingResponse(with_signs_of_life(encoded(), b"\n"), media_type="application/x-ndjson")


async def _refused(request: HttpRequest, error: Any) -> JSONResponse:
    """Errors of the framework are answered in the form of our own."""
    if isinstance(error, RequestValidationError):
        error = Refusal(422, explained(error.errors()))
    elif isinstance(error, HTTPException):
        error = Refusal(error.status_code, str(error.detail))
    return JSONResponse(error.body(request.url.path), error.status)
