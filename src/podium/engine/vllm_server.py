"""An engine behind HTTP: `podium serve` on this machine or another, over vLLM or over the in-process engine.

In: single requests; those of one turn of the event loop travel in one HTTP call. Out: one answer per request. Weights
reach the server through a folder that both can read. The server outlives the run, so the run claims the server before
it pushes and releases it at its end. Every answer names the run that owns the weights; an answer by the weights of
another run or of a restarted server is an error.
"""

import asyncio
import json
import math
import os
import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import httpx
from pydantic import Field

from podium.engine.decoding.queue import check_room
from podium.errors import BusyError, CodecError, EngineError, InputError, PodiumError, WeightsError
from podium.model.chat import tokenizer_fingerprint
from podium.model.evidence import Held
from podium.model.handoff import read_manifest
from podium.model.load import Policy
from podium.records import Answer, EngineTraits, PrefixGroup, Request
from podium.remote.codec import from_plain, to_plain
from podium.remote.rollouts import Batching, Rollouts, Written
from podium.stages import OnTokens

CALL_TOKENS = 200_000
"""Prompt tokens of one HTTP call; a server accepts about three times as many."""
CALL_REQUESTS = 1_024
"""Of one HTTP call; a server accepts a few more (server/door.py)."""
RETRIES = 2
BACKOFF_S = 0.2
PING_S = 30.0
CONNECT_FAILURES = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class VllmServer:
    """`snapshot` has no effect: a server always has weights of its own. `in_flight`: the server takes new weights in
    the middle of answers."""

    traits = EngineTraits(channels=("adapter", "disk", "nccl"), outlives_run=True, shows_weights=True)

    def __init__(
        self,
        policy: Policy,
        snapshot: bool = False,
        in_flight: bool = False,
        *,
        url: Annotated[str, Field(description="http://host:port, https://host:port or unix:/path/of/socket")],
        token_file: Annotated[Path | None, Field(description="file with the server's token")] = None,
        token_env: Annotated[str | None, Field(description="environment variable with the server's token")] = None,
        timeout_s: Annotated[float, Field(gt=0, description="longest time of one call")] = 3600.0,
        silence_s: Annotated[float, Field(gt=0, description="longest time without a sign of life in a call")] = 30.0,
        concurrency: Annotated[int, Field(ge=1, description="calls at the same time; others wait")] = 64,
    ) -> None:
        self.policy_version: int | None = None
        self._policy, self._in_flight = policy, in_flight
        self._run: str | None = None
        self._connection = Connection(url, token_of(token_file, token_env), timeout_s, silence_s, concurrency)
        info = self._connection.ask("GET", "/info")
        try:
            theirs = {"model's size": info["vocabulary"], **info["tokenizer"]}
            self.traits = replace(
                type(self).traits,
                dtype=info["dtype"],
                weights_root=Path(info["weights_root"]),
                max_context_tokens=info["max_context_tokens"],
                transfer_ranks=info["transfer_ranks"],
            )
        except (KeyError, TypeError):
            raise EngineError(f"engine {url} is no `podium serve`") from None
        # With another tokenizer the same ids would mean other words.
        ours = {"model's size": policy.vocabulary, **tokenizer_fingerprint(policy.tokenizer)}
        if different := [name for name in ours if ours[name] != theirs.get(name)]:
            raise InputError(
                f"engine {url} serves another model than model.name: they differ in "
                f"{', '.join(different).replace('_', ' ')}; serve the model that is trained"
            )
        self._batching, self._name = Batching(self._ask, calls_of), secrets.token_hex(8)

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Answer:
        check_room(request, self.traits.max_context_tokens or self._policy.max_context_tokens)
        return await self._batching.generate(self._own(request), on_tokens)

    def release(self, name: str) -> None:
        """Nothing to free: the server's engine frees a prefix group after its last request."""

    def _own(self, request: Request) -> Request:
        """With names that no other client of the server uses."""
        group, episode = request.prefix_group, request.episode
        if group is not None:
            group = PrefixGroup(f"{self._name}/{group.name}", group.size)
        return replace(request, prefix_group=group, episode=episode and f"{self._name}/{episode}")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        found = await self._connection.call("/score", {"token_ids": list(token_ids), "run": self._run})
        logprobs: Any = found.get("logprobs") if isinstance(found, dict) else None
        is_list = isinstance(logprobs, list) and all(isinstance(each, (int, float)) for each in logprobs)
        if not is_list or not all(map(math.isfinite, logprobs)) or len(logprobs) != len(token_ids) - 1:
            raise EngineError(f"engine {self._connection.url} did not send one logprob per token for a score")
        self._check_version(found, "scored by")
        return logprobs

    async def held(self) -> Held | None:
        """Checksums of the weights that the server's engine samples with; None if the engine cannot show them."""
        found = await self._connection.call("/held", {"run": self._run})
        try:
            held = from_plain(Held | None, found["held"])
        except (KeyError, TypeError, CodecError):
            raise EngineError(f"engine {self._connection.url} does not say which weights it holds") from None
        self._check_version(found, "shows")
        return held

    async def load_folder(self, folder: Path, version: int) -> None:
        manifest = read_manifest(folder)
        body = {"id": folder.name, "version": version, "in_flight": self._in_flight, "run": self._run}
        taken = await self._connection.call("/reload_weights", body)
        file = "adapter_model.safetensors" if manifest["kind"] == "adapter" else "model.safetensors"
        expected = {"version": version, "sha256": manifest["files"][file]["sha256"]}
        if taken != expected:
            raise WeightsError(f"engine {self._connection.url} confirmed other weights than version {version}")
        self.policy_version = version

    async def join_transfer(self, init_info: dict[str, Any]) -> None:
        """The server's GPUs meet the trainer's (sync/nccl.py)."""
        await self._connection.call("/join_transfer", {**init_info, "run": self._run}, retries=0)

    async def receive_weights(self, update_info: dict[str, Any], version: int) -> None:
        """The server takes what the trainer broadcasts at the same time."""
        body = {**update_info, "version": version, "run": self._run}
        if await self._connection.call("/receive_weights", body, retries=0) != {"version": version}:
            raise WeightsError(f"engine {self._connection.url} confirmed other weights than version {version}")
        self.policy_version = version

    async def claim(self, run_id: str, scope: str) -> None:
        """Makes the engine this run's; an error if another run has it, or a claim has another scope."""
        await self._connection.call("/claim", {"run": run_id, "scope": scope})
        self._run = run_id

    async def ping(self) -> None:
        """Returns when the server's event loop answers. A pool calls it."""
        await self._connection.ping()

    async def disconnect(self) -> None:
        """Closes the connections of this event loop. A pool calls it."""
        await self._connection.close()

    def close(self) -> None:
        """Releases the engine. A server that cannot be reached ends the claim after some time."""
        if self._run is not None:
            with suppress(PodiumError):
                self._connection.ask("POST", "/release", {"run": self._run}, timeout_s=10.0)
        self._run = None

    async def _ask(self, requests: list[Request]) -> AsyncGenerator[tuple[int, Answer]]:
        missing = set(range(len(requests)))
        body = to_plain(Rollouts.of(requests, self._run))
        async with aclosing(self._connection.stream("/rollouts", body)) as lines:
            async for line in lines:
                yield self._answer(line, requests, missing)
        if missing:
            raise EngineError(f"engine {self._connection.url} left out {len(missing)} of {len(requests)} answers")

    def _answer(self, line: Any, requests: Sequence[Request], missing: set[int]) -> tuple[int, Answer]:
        """An error if the line is not a valid answer to one of the requests."""
        url = self._connection.url
        if isinstance(line, dict) and "error" in line:
            raise EngineError(f"engine {url}: {str(line['error'])[:500]}")
        try:
            written = from_plain(Written, line)
            missing.remove(written.place)
        except (KeyError, CodecError):
            raise EngineError(f"engine {url} sent a line that answers nothing") from None
        answer, label = written.answer, requests[written.place].label
        if len(answer.token_ids) != len(answer.logprobs):
            raise EngineError(f"engine {url}: {label} has wrong counts of ids or logprobs")
        if not all(map(math.isfinite, answer.logprobs)) or answer.finish_reason not in ("stop", "length"):
            raise EngineError(f"engine {url}: {label} has logprobs that are no numbers or no known end")
        vocabulary = self._policy.vocabulary  # a look-up in the model
        if not all(0 <= i < vocabulary for i in answer.token_ids):
            raise EngineError(f"engine {url}: {label} has an id outside the vocabulary")
        self._check_owner(written.run)
        return written.place, answer

    def _check_version(self, found: Any, what: str) -> None:
        if self.policy_version is not None and found.get("policy_version") != self.policy_version:
            raise EngineError(
                f"engine {self._connection.url} {what} version {found.get('policy_version')}, it had confirmed "
                f"{self.policy_version}"
            )
        self._check_owner(found.get("run"))

    def _check_owner(self, run: Any) -> None:
        if self._run is not None and self.policy_version is not None and run != self._run:
            owner = f"run {run!r}" if run else "no run: was it started again?"
            raise EngineError(f"engine {self._connection.url} holds the weights of {owner}, not of {self._run!r}")


def calls_of(requests: Sequence[Request]) -> Iterator[range]:
    """Which requests go into each HTTP call, so that a server accepts it. A prompt travels once per call."""
    first = tokens = 0
    prompts: set[tuple[int, ...]] = set()
    for place, request in enumerate(requests):
        more = 0 if request.token_ids in prompts else len(request.token_ids)
        if place > first and (tokens + more > CALL_TOKENS or place - first == CALL_REQUESTS):
            yield range(first, place)
            first, tokens, more, prompts = place, 0, len(request.token_ids), set()
        tokens += more
        prompts.add(request.token_ids)
    if requests:
        yield range(first, len(requests))


class Connection:
    """HTTP to one server, by a port or a unix socket; every wait has a deadline. `timeout_s` limits a whole call,
    `silence_s` the time without a byte while answers are streamed."""

    def __init__(self, url: str, token: str | None, timeout_s: float, silence_s: float, calls: int) -> None:
        if not url.startswith(("http://", "https://", "unix:")):
            raise InputError(f"engine.url = {url!r}: give http://host:port, https://host:port or unix:/path/of/socket")
        self.url, self._token = url, token
        self._timeout_s, self._silence_s, self._calls = timeout_s, silence_s, calls
        self._client: tuple[Any, httpx.AsyncClient] | None = None
        """With its event loop: connections cannot go from one loop to another."""

    def ask(self, method: str, path: str, body: Any = None, timeout_s: float = 30.0) -> Any:
        """One call that blocks. The calling thread may have an event loop already, so another thread makes the call."""
        own = Connection(self.url, self._token, timeout_s, timeout_s, calls=1)

        async def call() -> Any:
            try:
                return await own.call(path, body, method=method)
            finally:
                await own.close()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, call()).result()

    async def call(self, path: str, body: Any, *, method: str = "POST", retries: int = RETRIES) -> Any:
        """One call. With `retries` it may be made several times, which must have the same effect."""
        for attempt in range(retries + 1):
            try:
                async with asyncio.timeout(self._timeout_s):
                    response = await self._open().request(method, path, json=body)
                if response.status_code != 503 or attempt == retries:
                    return self._checked(response)
            except (httpx.HTTPError, TimeoutError) as error:
                if attempt == retries or isinstance(error, TimeoutError):
                    raise self._broken(error) from None
            await asyncio.sleep(BACKOFF_S * 2**attempt)
        raise AssertionError("unreachable")

    async def stream(self, path: str, body: Any) -> AsyncGenerator[Any]:
        """The lines of an answer. A call that the server did not accept is repeated; one that broke off is an error."""
        for attempt in range(RETRIES + 1):
            has_begun = False
            try:
                async with asyncio.timeout(self._timeout_s), self._call(path, body) as response:
                    if response.status_code == 503 and attempt < RETRIES:
                        raise httpx.ConnectError("busy")
                    if response.status_code != 200:
                        await response.aread()
                        self._checked(response)
                    has_begun = True
                    async for line in response.aiter_lines():
                        if line:
                            yield self._parsed(line)
                    return
            except (httpx.HTTPError, TimeoutError) as error:
                if has_begun or attempt == RETRIES or not isinstance(error, CONNECT_FAILURES):
                    raise self._broken(error) from None
            await asyncio.sleep(BACKOFF_S * 2**attempt)

    async def ping(self) -> None:
        try:
            response = await self._open().get("/health", timeout=PING_S)
        except httpx.HTTPError as error:
            raise EngineError(f"{type(error).__name__}: {error}") from None
        if response.status_code != 200:
            raise EngineError(f"its health is {response.status_code}")

    def _call(self, path: str, body: Any) -> AbstractAsyncContextManager[httpx.Response]:
        timeout = httpx.Timeout(self._silence_s, connect=min(10.0, self._silence_s), pool=self._timeout_s)
        return self._open().stream("POST", path, json=body, timeout=timeout)

    def _open(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            # No kept connections: calls are few and long, and a server may just have closed a kept one.
            limits = httpx.Limits(max_connections=self._calls, max_keepalive_connections=0)
            transport = httpx.AsyncHTTPTransport(uds=self._socket, limits=limits)
            self._client = (loop, httpx.AsyncClient(transport=transport, **self._options(self._timeout_s)))
        return self._client[1]

    async def close(self) -> None:
        """Closes what this event loop has open; the next call opens it again."""
        if self._client is not None and self._client[0] is asyncio.get_running_loop():
            _, client = self._client
            self._client = None
            await client.aclose()

    def _options(self, timeout_s: float) -> dict[str, Any]:
        headers = {} if self._token is None else {"authorization": f"Bearer {self._token}"}
        return {
            "base_url": "http://engine" if self._socket else self.url,
            "headers": headers,
            "timeout": httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)),
            "trust_env": False,  # never through a proxy
        }

    @property
    def _socket(self) -> str | None:
        return self.url.removeprefix("unix:") if self.url.startswith("unix:") else None

    def _checked(self, response: httpx.Response) -> Any:
        if response.status_code == 200:
            return self._parsed(response.text)
        try:
            reason = str(response.json()["error"])[:500]
        except (ValueError, KeyError, TypeError):
            reason = "no reason given"
        status, path, kind = response.status_code, response.request.url.path, EngineError
        if status == 401:
            raise InputError(
                f"engine {self.url} does not accept the token; give engine.token_file or engine.token_env the token "
                "that the server was started with"
            )
        if path == "/reload_weights" and status in (403, 404, 422):
            kind = WeightsError
        elif status == 503:
            kind = BusyError
        elif status in (400, 413, 415, 422) or (path == "/claim" and status == 409):
            kind = InputError  # with 409 on other paths, the claim was lost later: an engine's error
        raise kind(f"engine {self.url} answered {status}: {reason}")

    def _parsed(self, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            raise EngineError(f"engine {self.url} did not send JSON") from None

    def _broken(self, error: Exception) -> EngineError:
        if isinstance(error, (TimeoutError, httpx.TimeoutException)):
            return EngineError(f"engine {self.url} did not answer in time ({type(error).__name__})")
        return EngineError(f"engine {self.url} cannot be reached or broke off: {type(error).__name__}: {error}")


def token_of(file: Path | None, variable: str | None) -> str | None:
    """From a file or an environment variable; the settings say only where the token is."""
    if file is not None and variable is not None:
        raise InputError("engine.token_file and engine.token_env both say where the token is; remove one")
    if variable is not None:
        if not os.environ.get(variable):
            raise InputError("engine.token_env names no environment variable that is set; put the token into one")
        return os.environ[variable].strip()
    if file is None:
        return None
    try:
        return file.expanduser().read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        raise InputError(f"engine.token_file = {str(file)!r}: no file of ASCII text that can be read") from None
