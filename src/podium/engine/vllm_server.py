"""An engine behind HTTP: `podium serve` on this machine or another, over vLLM or over the in-process engine.

In: requests. Out: answers as they become whole, in any order. Weights reach it through a folder that both see. It lives
on after the run, so the run claims it before it pushes and releases it at its end; every answer says whose weights
wrote it, and one by another run's or by a restarted server's is an error.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from podium.engine._connection import Connection, token_of
from podium.errors import EngineError, InputError, PodiumError, WeightsError
from podium.model.evidence import Held
from podium.model.fingerprint import tokenizer_fingerprint
from podium.model.handoff import publish, read_manifest, remove_published
from podium.model.load import Policy
from podium.records import Answer, Request, Sampling

CALL_TOKENS = 200_000
"""Prompt tokens of one HTTP call; a server takes about three times as many."""
CALL_ROLLOUTS = 8_192
CALL_PROMPTS = 2_048


class VllmServer:
    """`snapshot` is of no concern here: a server always has weights of its own."""

    channels = ("adapter", "disk", "nccl")
    outlives_run = True

    def __init__(
        self,
        policy: Policy,
        snapshot: bool = False,
        *,
        url: Annotated[str, Field(description="http://host:port, https://host:port or unix:/path/of/socket")],
        token_file: Annotated[Path | None, Field(description="file with the server's token")] = None,
        token_env: Annotated[str | None, Field(description="environment variable with the server's token")] = None,
        timeout_s: Annotated[float, Field(gt=0, description="longest time of one call")] = 3600.0,
        silence_s: Annotated[float, Field(gt=0, description="longest time without a sign of life in a call")] = 30.0,
        concurrency: Annotated[int, Field(ge=1, description="calls at the same time; others wait")] = 64,
    ) -> None:
        self.policy_version: int | None = None
        self.in_flight = False
        """Whether new weights are taken in the middle of answers; a schedule sets it."""
        self._policy = policy
        self._run: str | None = None
        self._connection = Connection(url, token_of(token_file, token_env), timeout_s, silence_s, concurrency)
        info = self._connection.ask("GET", "/info")
        self._shake_hands(info)
        self.dtype: str = info["dtype"]
        self.max_context_tokens: int = info["max_context_tokens"]
        self.weights_root = Path(info["weights_root"])
        self.transfer_ranks: int = info["transfer_ranks"]
        """GPUs that can meet the trainer's for `nccl`; 0: none."""

    def _shake_hands(self, info: Any) -> None:
        """Another tokenizer would mean other words by the same ids."""
        own = {"vocabulary": self._policy.vocabulary, "tokenizer": tokenizer_fingerprint(self._policy.tokenizer)}
        try:
            theirs = {"model's size": info["vocabulary"], **info["tokenizer"]}
            if not all((info["dtype"], info["max_context_tokens"], info["weights_root"], "transfer_ranks" in info)):
                raise KeyError
        except (KeyError, TypeError):
            raise EngineError(f"engine {self._connection.url} is no `podium serve`") from None
        ours = {"model's size": own["vocabulary"], **own["tokenizer"]}
        different = [name for name in ours if ours[name] != theirs.get(name)]
        if different:
            raise InputError(
                f"engine {self._connection.url} serves another model than model.name: they differ in "
                f"{', '.join(different).replace('_', ' ')}; serve the model that is trained"
            )

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Answer]:
        ready: asyncio.Queue[Answer | Exception | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._call(part, sampling, ready)) for part in _parts(requests)]
        missing, running = {request.key for request in requests}, len(tasks)
        try:
            while running:
                item = await ready.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                    continue
                missing.discard(item.key)
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if missing:
            raise EngineError(f"engine {self._connection.url} left out {len(missing)} of {len(requests)} answers")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        found = await self._connection.post("/score", {"token_ids": list(token_ids), "run": self._run})
        logprobs: Any = found.get("logprobs") if isinstance(found, dict) else None
        if not _are_numbers(logprobs) or len(logprobs) != len(token_ids) - 1:
            raise EngineError(f"engine {self._connection.url} sent no logprob a token for a score")
        self._check_version(found, "scored by")
        return logprobs

    async def held(self) -> Held | None:
        """Checksums of what the server's engine samples with; None where that engine cannot show it."""
        found = await self._connection.post("/held", {"run": self._run})
        try:
            held = None if found["held"] is None else Held.from_json(found["held"])
        except (KeyError, TypeError, ValueError, AttributeError):
            raise EngineError(f"engine {self._connection.url} does not say which weights it holds") from None
        self._check_version(found, "shows")
        return held

    async def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Through a folder of its own, gone afterwards."""
        folder = await asyncio.to_thread(publish, self.weights_root, self._policy, weights, version)
        try:
            await self.load_folder(folder, version)
        finally:
            await asyncio.to_thread(remove_published, folder)

    async def load_folder(self, folder: Path, version: int) -> None:
        manifest = read_manifest(folder)
        body = {"id": folder.name, "version": version, "in_flight": self.in_flight, "run": self._run}
        taken = await self._connection.post("/reload_weights", body)
        file = "adapter_model.safetensors" if manifest["kind"] == "adapter" else "model.safetensors"
        expected = {"version": version, "sha256": manifest["files"][file]["sha256"]}
        if taken != expected:
            raise WeightsError(f"engine {self._connection.url} confirmed other weights than version {version}")
        self.policy_version = version

    async def join_transfer(self, init_info: dict[str, Any]) -> None:
        """The server's GPUs meet the trainer's (sync/nccl.py)."""
        await self._connection.post("/join_transfer", {**init_info, "run": self._run}, retries=0)

    async def receive_weights(self, update_info: dict[str, Any], version: int) -> None:
        """The server takes what the trainer broadcasts at the same time."""
        body = {**update_info, "version": version, "run": self._run}
        if await self._connection.post("/receive_weights", body, retries=0) != {"version": version}:
            raise WeightsError(f"engine {self._connection.url} confirmed other weights than version {version}")
        self.policy_version = version

    async def claim(self, run_id: str, scope: str) -> None:
        """The engine is this run's from now on; one that is another's, or of another scope, is refused."""
        await self._connection.post("/claim", {"run": run_id, "scope": scope})
        self._run = run_id

    async def disconnect(self) -> None:
        """Closes the connections of this event loop, for whoever keeps many engines."""
        await self._connection.close()

    def close(self) -> None:
        """Releases the engine; one that cannot be told finds out by itself."""
        if self._run is not None:
            with suppress(PodiumError):
                self._connection.ask("POST", "/release", {"run": self._run}, timeout_s=10.0)
        self._run = None

    async def _call(self, requests: Sequence[Request], sampling: Sampling, ready: asyncio.Queue[Any]) -> None:
        asked = {request.key: request for request in requests}
        try:
            body = _body(requests, sampling, self._run)
            async with aclosing(self._connection.stream("/generate", body)) as lines:
                async for line in lines:
                    ready.put_nowait(self._answer(line, asked))
            ready.put_nowait(None)
        except Exception as error:
            ready.put_nowait(error)

    def _answer(self, line: Any, asked: dict[int, Request]) -> Answer:
        """A line that is not what was asked for is the engine's failure."""
        url = self._connection.url
        if isinstance(line, dict) and "error" in line:
            raise EngineError(f"engine {url}: {str(line['error'])[:500]}")
        try:
            request = asked.pop(line["key"])
            ids = tuple(tuple(_typed(int, row)) for row in line["token_ids"])
            logprobs = tuple(tuple(map(float, _typed((int, float), row))) for row in line["logprobs"])
            versions = tuple((first, last) for first, last in (_typed(int, pair) for pair in line["policy_versions"]))
            answer = Answer(request.key, ids, logprobs, tuple(line["finish_reason"]), versions)
        except (KeyError, TypeError, ValueError):
            raise EngineError(f"engine {url} sent a line that answers nothing") from None
        counts = {len(part) for part in (ids, logprobs, answer.finish_reasons, versions)}
        if counts != {len(request.seeds)} or [len(row) for row in ids] != [len(row) for row in logprobs]:
            raise EngineError(f"engine {url}: prompt {request.key} has wrong counts of rollouts, ids or logprobs")
        if not all(_are_numbers(row) for row in logprobs) or not set(answer.finish_reasons) <= {"stop", "length"}:
            raise EngineError(f"engine {url}: prompt {request.key} has logprobs that are no numbers or no known end")
        vocabulary = self._policy.vocabulary  # asked once: it is looked up in the model each time
        if not all(0 <= i < vocabulary for row in ids for i in row):
            raise EngineError(f"engine {url}: prompt {request.key} has an id outside the vocabulary")
        self._check_owner(line.get("run"))
        return answer

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


def _parts(requests: Sequence[Request]) -> Iterator[list[Request]]:
    """The requests in calls of a size that a server takes."""
    part: list[Request] = []
    tokens = rollouts = 0
    for request in requests:
        tokens, rollouts = tokens + len(request.token_ids), rollouts + len(request.seeds)
        if part and (tokens > CALL_TOKENS or rollouts > CALL_ROLLOUTS or len(part) == CALL_PROMPTS):
            yield part
            part, tokens, rollouts = [], len(request.token_ids), len(request.seeds)
        part.append(request)
    if part:
        yield part


def _body(requests: Sequence[Request], sampling: Sampling, run: str | None) -> dict[str, Any]:
    return {
        "requests": [
            {"key": request.key, "prompt_token_ids": list(request.token_ids), "seeds": list(request.seeds)}
            for request in requests
        ],
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_ids),
        "stream": True,
        "run": run,
    }


def _typed(kind: Any, values: Any) -> Any:
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise TypeError
    return values


def _are_numbers(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(
        isinstance(value, (int, float)) and math.isfinite(value) for value in values
    )
