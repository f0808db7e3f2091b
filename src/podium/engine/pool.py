"""Many engines as one: local processes that it starts itself, servers that run already, or both.

In: requests. Out: answers. A request goes whole to the member with the fewest rollouts in flight; a member that dies,
freezes or does not take new weights is replaced, and what it was writing is written by another. In-process members
write the same rollouts wherever they run, so a run in which workers were killed is the same run; their answers come in
the order of the requests for that reason, others as they become whole.
"""

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from podium.engine._pool.dispatch import Terms
from podium.engine._pool.health import Pulse
from podium.engine._pool.keeper import Keeper, PoolFolder, hold
from podium.engine._pool.supervisor import Rules, Weights
from podium.engine._pool.together import (
    CLOSE_S,
    DEFAULT_CONCURRENCY,
    IDLE_S,
    PROMPTS_PER_REQUEST,
    TOLERANCE,
    Together,
)
from podium.engine._pool.workers import model_of, start_local, start_server
from podium.engine.vllm_server import VllmServer
from podium.errors import EngineError, InputError
from podium.lookup import find, validate_options
from podium.model.device_thread import team_size
from podium.model.handoff import manifest_of, publish, remove_published
from podium.model.load import Policy

DEFAULT_REPLICAS = (2, 2)
MAX_CALLS = 4096
"""Connections to one member; how much it is asked is decided before."""

Seconds = Annotated[float, Field(gt=0)]


class Pool(Together):
    channels = ("adapter", "disk")

    def __init__(
        self,
        policy: Policy,
        snapshot: bool = False,
        compute_dtype: torch.dtype | None = None,
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
            Field(description="rollouts in flight per member; adaptive: found out. By default 64 inprocess, 256 vLLM"),
        ] = None,
        prompts_per_request: Annotated[
            Annotated[int, Field(ge=1)] | None,
            Field(description="prompts that a member gets together; by default 4 inprocess, where they share a batch"),
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
        self.in_flight = False
        self.outlives_run = bool(urls)
        self._policy, self._of = policy, of or (None if urls else "inprocess")
        if self._of is not None and find_spec("fastapi") is None:
            raise InputError("engine.name = 'pool' starts servers, which need FastAPI: pip install 'podium-rl[server]'")
        self._urls, self._token_file = list(dict.fromkeys(urls)), token_file
        self._start_s, self._request_s = start_s, request_s
        dtype = self._precision(member.get("dtype"), floor)
        limits = (max_restarts, start_s, recovery_s, idle_s or IDLE_S, TOLERANCE[dtype])
        rules = Rules(replicas or DEFAULT_REPLICAS, floor, *limits)
        fixed = None if concurrency == "adaptive" else concurrency or DEFAULT_CONCURRENCY[self._of]
        is_exact = self._of == "inprocess"
        together = prompts_per_request or PROMPTS_PER_REQUEST[self._of]
        terms = Terms(together, is_exact, max_redispatches, request_s, recovery_s)
        super().__init__(dtype, rules, Pulse(frozen_s, stalled_s), terms, fixed)
        self._member_options, self._compute_dtype = member, compute_dtype and str(compute_dtype).partition(".")[2]
        self._folder: PoolFolder | None = None
        self._keeper: Keeper | None = None
        self._held: list[Path] = []
        self._claimed: tuple[str, str] | None = None

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

    @property
    def weights_root(self) -> Path:
        """Where published weights are read; made, and its keeper started, when it is first asked for."""
        if self._folder is None:
            self._folder = PoolFolder()
            given = {
                "model": model_of(self._policy),
                "engine": self._of,
                "options": self._member_options,
                "compute_dtype": self._compute_dtype,
                "threads": max(1, team_size() // self._supervisor.rules.replicas[1]),
            }
            self._keeper = Keeper(self._folder.path, given, self._start_s)
            asyncio.run_coroutine_threadsafe(self._keeper.begin(), self._thread.loop)
        return self._folder.weights

    async def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        folder = await asyncio.to_thread(publish, self.weights_root, self._policy, weights, version)
        try:
            await self.load_folder(folder, version)
        finally:
            remove_published(folder)

    async def load_folder(self, folder: Path, version: int) -> None:
        await self._thread.call(self._push(folder, version))
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
            if self._keeper is not None:
                self._keeper.close()
            if self._folder is not None:
                self._folder.remove()
            self._keeper = self._folder = None

    async def _push(self, folder: Path, version: int) -> None:
        """From a copy by links that stays until the next push, for members that come later."""
        held = self.weights_root / f"pool-{folder.name}"
        await asyncio.to_thread(hold, folder, manifest_of(folder), held)
        try:
            await self._supervisor.push(Weights(held, version), self._begin)
        except BaseException:
            await asyncio.to_thread(remove_published, held)
            raise
        for old in self._held:
            await asyncio.to_thread(remove_published, old)
        self._held = [held]

    def _begin(self) -> None:
        assert self._folder is not None
        assert self._keeper is not None
        local = partial(start_local, self._keeper, self._folder.sockets, self._connect) if self._of else None
        servers = [(url, partial(self._start_server, url)) for url in self._urls]
        self._supervisor.start(local, servers)

    async def _start_server(self, url: str, name: str) -> Any:
        assert self._keeper is not None
        return await start_server(self._keeper, url, self._claimed, self._connect)

    def _connect(self, url: str) -> Any:
        """Waits for its first answer, on a thread of its own."""
        token_file = None if url.startswith("unix:") else self._token_file
        limits = {"timeout_s": self._request_s, "concurrency": MAX_CALLS}
        engine = VllmServer(self._policy, url=url, token_file=token_file, **limits)
        engine.in_flight = self.in_flight
        return engine

    def _precision(self, of_processes: str | None, floor: int) -> str:
        """The coarsest that members compute in. Servers are asked, so one with another model is refused now."""
        found = set()
        if self._of is not None:
            on_gpu = self._of == "vllm_local" and self._policy.device.type == "cuda"
            found.add(of_processes or ("bfloat16" if on_gpu else "float32"))
        problems: list[EngineError] = []
        for url in self._urls:
            try:
                found.add(self._connect(url).dtype)
            except EngineError as error:
                problems.append(error)
        if self._of is None and len(self._urls) - len(problems) < floor:
            raise problems[0]
        return "bfloat16" if "bfloat16" in found else "float32"

    async def _end(self) -> None:
        servers = [member.worker.engine for member in self._members if member.worker.pid is None]
        await self._supervisor.close()
        for engine in servers:
            await asyncio.to_thread(engine.close)


def num_processes(options: Mapping[str, Any]) -> int:
    """Most processes that a pool with these options starts."""
    return (options["replicas"] or DEFAULT_REPLICAS)[1] if options["of"] or not options["urls"] else 0
