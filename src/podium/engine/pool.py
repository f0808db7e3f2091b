"""Many engines as one: local processes that it starts itself, servers that run already, or both.

In: requests. Out: answers. A request goes to the member with the fewest rollouts in flight, and a prefix group goes to
one member. A member that dies, freezes or does not take new weights is replaced, and another member writes what it was
writing. In-process members write the same rollouts wherever they run, so a run in which workers were killed is the same
run.
"""

import asyncio
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from podium.engine.members.engine_pool import CLOSE_S, DEFAULT_CONCURRENCY, EnginePool, Weights
from podium.engine.members.folder import PoolFolder, hold
from podium.engine.members.workers import model_of, start_local, start_server
from podium.engine.vllm_server import VllmServer
from podium.errors import EngineError, InputError
from podium.model.device_thread import team_size
from podium.model.handoff import manifest_of, publish, remove_published
from podium.model.load import Policy
from podium.remote.fork_server import ForkServer, StartError
from podium.remote.pool import IDLE_S, OnEvent, Rules
from podium.settings.lookup import find, validate_options

DEFAULT_REPLICAS = (2, 2)
MAX_CALLS = 4096
"""Connections to one member; how much it is asked is decided before."""

Seconds = Annotated[float, Field(gt=0)]


class Pool(EnginePool):
    def __init__(
        self,
        policy: Policy,
        snapshot: bool = False,
        compute_dtype: torch.dtype | None = None,
        in_flight: bool = False,
        on_event: OnEvent = lambda kind, **details: None,
        *,
        of: Annotated[
            Literal["inprocess", "vllm_local"] | None,
            Field(description="engine of the processes that the pool starts; by default inprocess, none with urls"),
        ] = None,
        replicas: Annotated[
            tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None,
            Field(description="fewest and most processes; by default [2, 2]. More start while requests wait for room"),
        ] = None,
        member: Annotated[dict[str, Any], Field(description="options of the engine that `of` names")] = {},  # noqa: B006
        urls: Annotated[list[str], Field(description="servers that run already (podium serve)")] = [],  # noqa: B006
        token_file: Annotated[Path | None, Field(description="holds the token of the servers")] = None,
        concurrency: Annotated[
            Annotated[int, Field(ge=1)] | Literal["adaptive"] | None,
            Field(description="rollouts in flight per member; adaptive: found out. By default 256; on a CPU 4 prompts"),
        ] = None,
        floor: Annotated[int, Field(ge=1, description="members that must be in service, or the run fails")] = 1,
        max_restarts: Annotated[int, Field(ge=0, description="starts in a row that may fail in one place")] = 5,
        max_redispatches: Annotated[int, Field(ge=0, description="times that a request may be sent again")] = 5,
        frozen_s: Annotated[Seconds, Field(description="a member silent for so long is taken for dead")] = 4.0,
        stalled_s: Annotated[Seconds, Field(description="and one that wrote no token for so long")] = 60.0,
        start_s: Annotated[Seconds, Field(description="for a member to start and take weights")] = 300.0,
        recovery_s: Annotated[Seconds, Field(description="with fewer than `floor` for so long, the run fails")] = 120.0,
        idle_s: Annotated[Seconds | None, Field(description="after which spare members end; by default 60")] = None,
        request_s: Annotated[Seconds, Field(description="for one request")] = 3600.0,
    ) -> None:
        self._policy, self._of, self._in_flight = policy, of or (None if urls else "inprocess"), in_flight
        if self._of is not None and find_spec("fastapi") is None:
            raise InputError("engine.name = 'pool' starts servers, which need FastAPI: pip install 'podium-rl[server]'")
        self._urls, self._token_file = list(dict.fromkeys(urls)), token_file
        self._rules = Rules(
            replicas or DEFAULT_REPLICAS,
            floor,
            max_restarts,
            start_s,
            recovery_s,
            frozen_s,
            request_s,
            idle_s or IDLE_S,
            max_redispatches,
            kind="engines",
            floor_name="engine.floor",
            error=EngineError,
        )
        fixed = None if concurrency == "adaptive" else concurrency or DEFAULT_CONCURRENCY
        dtype = self._precision(member.get("dtype"), floor)
        self._folder = PoolFolder()
        traits = replace(
            type(self).traits,
            dtype=dtype,
            weights_root=self._folder.weights,
            outlives_run=bool(urls),
            max_context_tokens=min(member.get("max_context_tokens") or sys.maxsize, policy.max_context_tokens),
            keeps_order=self._of == "inprocess" and policy.device.type == "cpu" and not urls,
        )
        super().__init__(self._rules, traits, fixed, stalled_s, on_event)
        given = {
            "model": model_of(policy),
            "engine": self._of,
            "options": member,
            "compute_dtype": compute_dtype and str(compute_dtype).partition(".")[2],
        }
        threads = max(1, team_size() // self._rules.replicas[1])
        self._server = _fork_server(given, threads, self._folder, start_s)
        self._held: list[Path] = []
        self._claimed: tuple[str, str] | None = None
        asyncio.run_coroutine_threadsafe(_started(self._server), self._thread.loop)

    @staticmethod
    def refuse(**options: Any) -> None:
        """What has no effect, or cannot be right, said before the model is loaded."""
        of, urls = options["of"], options["urls"]
        if urls and of is None:
            for key in ("replicas", "member", "idle_s"):
                if options[key]:
                    raise InputError(
                        f"engine.{key} has no effect: the pool starts no process; remove it or set engine.of"
                    )
        if options["token_file"] is not None and not urls:
            raise InputError("engine.token_file has no effect without engine.urls; remove it")
        least, most = options["replicas"] or DEFAULT_REPLICAS
        if least > most:
            raise InputError(f"engine.replicas = {[least, most]}: the fewest come first")
        if options["idle_s"] and least == most:
            raise InputError(f"engine.idle_s has no effect with engine.replicas = {[least, most]}; remove it")
        all_members = len(set(urls)) + num_processes(options)
        if options["floor"] > all_members:
            raise InputError(f"engine.floor = {options['floor']}: the pool has at most {all_members} members")
        if of or not urls:
            name = of or "inprocess"
            validate_options("engine.member", find("engine", name), options["member"])
            if options["member"].get("sleep"):
                raise InputError("engine.member.sleep has no effect: nothing tells members when to sleep; remove it")

    async def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        folder = await asyncio.to_thread(publish, self._folder.weights, self._policy, weights, version)
        try:
            await self.load_folder(folder, version)
        finally:
            remove_published(folder)

    async def load_folder(self, folder: Path, version: int) -> None:
        await self._thread.call(self._push_folder(folder, version))
        self.policy_version = version

    async def claim(self, run_id: str, scope: str) -> None:
        """For servers only: whoever started them may want their weights back."""
        if scope == "engine" and self._of is not None:
            raise InputError("sync.scope = 'engine' has no effect on processes that end with the run; remove engine.of")
        self._claimed = (run_id, scope)

    def close(self) -> None:
        """Ends every process and removes the pool's folder."""
        try:
            self._thread.finish(self._end(), CLOSE_S)
        finally:
            self._server.close()
            self._folder.remove()

    async def _push_folder(self, folder: Path, version: int) -> None:
        """From a copy by links that stays until the next push, for members that come later."""
        held = self._folder.weights / f"pool-{folder.name}"
        await asyncio.to_thread(hold, folder, manifest_of(folder), held)
        try:
            await self._push(Weights(held, version))
        except BaseException:
            await asyncio.to_thread(remove_published, held)
            raise
        for old in self._held:
            await asyncio.to_thread(remove_published, old)
        self._held = [held]

    def _start(self) -> None:
        local = partial(start_local, self._server, self._folder, self._connect) if self._of else None
        servers = [(url, partial(self._start_server, url)) for url in self._urls]
        self._pool.start(local, servers)

    async def _start_server(self, url: str, name: str) -> Any:
        return await start_server(self._server, url, self._claimed, self._connect)

    def _connect(self, url: str) -> Any:
        """Waits for its first answer, on a thread of its own."""
        token_file = None if url.startswith("unix:") else self._token_file
        limits = {"timeout_s": self._rules.request_s, "concurrency": MAX_CALLS}
        return VllmServer(self._policy, in_flight=self._in_flight, url=url, token_file=token_file, **limits)

    def _precision(self, of_processes: str | None, floor: int) -> str:
        """The coarsest that members compute in. Servers are asked, so one with another model is refused now."""
        found = set()
        if self._of is not None:
            on_gpu = self._of == "vllm_local" and self._policy.device.type == "cuda"
            found.add(of_processes or ("bfloat16" if on_gpu else "float32"))
        problems: list[EngineError] = []
        for url in self._urls:
            try:
                found.add(self._connect(url).traits.dtype)
            except EngineError as error:
                problems.append(error)
        if self._of is None and len(self._urls) - len(problems) < floor:
            raise problems[0]
        return "bfloat16" if "bfloat16" in found else "float32"

    async def _end(self) -> None:
        servers = [member.worker.engine for member in self._pool.members if member.worker.pid is None]
        await self._pool.close()
        for engine in servers:
            await asyncio.to_thread(engine.close)


def num_processes(options: Mapping[str, Any]) -> int:
    """Most processes that a pool with these options starts."""
    return (options["replicas"] or DEFAULT_REPLICAS)[1] if options["of"] or not options["urls"] else 0


def _fork_server(given: Mapping[str, Any], threads: int, folder: PoolFolder, start_s: float) -> ForkServer:
    """In-process engines on a CPU are loaded once, before the fork, and then share the memory of the base weights."""
    is_shared = given["engine"] == "inprocess" and given["model"]["device"] == "cpu"
    one_thread = {"TOKENIZERS_PARALLELISM": "false"} | ({"OMP_NUM_THREADS": "1"} if is_shared else {})
    return ForkServer(
        "podium.server.worker:PoolWorker",
        {"given": given, "threads": threads, "root": str(folder.weights)},
        is_shared=is_shared,
        start_s=start_s,
        environment=one_thread,  # a process without other threads forks safely
        leftovers=[folder.path],
    )


async def _started(server: ForkServer) -> None:
    """Before the first worker is needed, which reports the problem if there is one."""
    with suppress(StartError):
        await server.start()
