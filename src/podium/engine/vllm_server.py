"""An engine behind HTTP: `podium serve` on this machine or another, over vLLM or over the in-process engine.

In: single requests; those of one turn of the event loop travel in one HTTP call. Out: one answer per request. Weights
reach the server through a folder that both see. The server lives on after the run, so the run claims it before it
pushes and releases it at its end. Every answer says whose weights wrote it; an answer by the weights of another run or
of a restarted server is an error.
"""

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from podium.engine.decoding.queue import check_room
from podium.engine.vllm.connection import Connection, token_of
from podium.errors import CodecError, EngineError, InputError, PodiumError, WeightsError
from podium.model.chat import tokenizer_fingerprint
from podium.model.evidence import Held
from podium.model.handoff import publish, read_manifest, remove_published
from podium.model.load import Policy
from podium.records import Answer, EngineTraits, PrefixGroup, Request
from podium.remote.codec import from_plain, to_plain
from podium.remote.rollouts import Batching, Rollouts, Written
from podium.stages import OnTokens

CALL_TOKENS = 200_000
"""Prompt tokens of one HTTP call; a server takes about three times as many."""
CALL_REQUESTS = 1_024
"""Of one HTTP call; a server takes a few more (server/door.py)."""


class VllmServer:
    """`snapshot` is of no concern here: a server always has weights of its own. `in_flight`: the server takes new
    weights in the middle of answers."""

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
        self._shake_hands(info)
        root = Path(info["weights_root"])
        self.traits = replace(
            type(self).traits,
            dtype=info["dtype"],
            weights_root=root,
            max_context_tokens=info["max_context_tokens"],
            transfer_ranks=info["transfer_ranks"],
        )
        self._weights_root = root
        self._batching, self._name = Batching(self._ask, call_sizes), secrets.token_hex(8)

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
            held = from_plain(Held | None, found["held"])
        except (KeyError, TypeError, CodecError):
            raise EngineError(f"engine {self._connection.url} does not say which weights it holds") from None
        self._check_version(found, "shows")
        return held

    async def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Through a folder of its own, gone afterwards."""
        folder = await asyncio.to_thread(publish, self._weights_root, self._policy, weights, version)
        try:
            await self.load_folder(folder, version)
        finally:
            await asyncio.to_thread(remove_published, folder)

    async def load_folder(self, folder: Path, version: int) -> None:
        manifest = read_manifest(folder)
        body = {"id": folder.name, "version": version, "in_flight": self._in_flight, "run": self._run}
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
        """Closes the connections of this event loop. A pool calls it for each of its engines."""
        await self._connection.close()

    def close(self) -> None:
        """Releases the engine; one that cannot be told finds out by itself."""
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
        """A line that is not what was asked for is the engine's failure."""
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
        vocabulary = self._policy.vocabulary  # asked once: it is looked up in the model each time
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


def call_sizes(requests: Sequence[Request]) -> Iterator[int]:
    """How many requests go into each HTTP call, so that a server takes it. A prompt travels once per call."""
    size = tokens = 0
    prompts: set[tuple[int, ...]] = set()
    for request in requests:
        more = 0 if request.token_ids in prompts else len(request.token_ids)
        if size and (tokens + more > CALL_TOKENS or size == CALL_REQUESTS):
            yield size
            size, tokens, more, prompts = 0, 0, len(request.token_ids), set()
        size, tokens = size + 1, tokens + more
        prompts.add(request.token_ids)
    if size:
        yield size


def _are_numbers(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(
        isinstance(value, (int, float)) and math.isfinite(value) for value in values
    )
