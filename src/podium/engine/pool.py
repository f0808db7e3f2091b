"""Many engines as one: local processes that it starts itself, servers that run already, or both.

In: requests. Out: answers. remote/engine_pool.py says which member answers what, and what happens when a member fails.
Here is what runs at the other end of a member: a forked process that serves an engine on a unix socket
(server/serve.py), or a server. In-process members write the same rollouts wherever they run, so a run in which workers
were killed is the same run.
"""

import asyncio
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from podium.engine.decoding.queue import check_room
from podium.engine.vllm_server import VllmServer
from podium.errors import EngineError, InputError, WeightsError
from podium.model.device_thread import team_size
from podium.model.handoff import manifest_of, remove_published
from podium.model.load import Policy
from podium.records import Answer, Request
from podium.remote.engine_pool import CLOSE_S, DEFAULT_CONCURRENCY, EnginePool, Weights
from podium.remote.fork_server import Child, ForkServer, RemoteError
from podium.remote.pool import IDLE_S, OnEvent, Rules
from podium.settings.lookup import find, validate_options
from podium.stages import OnTokens

DEFAULT_REPLICAS = (2, 2)
MAX_CALLS = 4096
"""Connections to one member. The pool itself limits how much a member is asked."""
FOLDER_PREFIX = "podium-pool-"
LONGEST_SOCKET = 100
"""Bytes of a unix socket's path; the kernel takes a few more."""

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
        self._urls, self._token_file, self._request_s = list(dict.fromkeys(urls)), token_file, request_s
        rules = Rules(
            replicas=replicas or DEFAULT_REPLICAS,
            floor=floor,
            max_restarts=max_restarts,
            start_s=start_s,
            recovery_s=recovery_s,
            frozen_s=frozen_s,
            request_s=request_s,
            idle_s=idle_s or IDLE_S,
            max_redispatches=max_redispatches,
            kind="engines",
            floor_name="engine.floor",
            error=EngineError,
        )
        dtype = self._precision(member.get("dtype"), floor)
        # In-process engines on a CPU are loaded before the fork and share the memory of the base weights.
        is_shared = self._of == "inprocess" and policy.device.type == "cpu"
        self._folder = PoolFolder()
        self._room = min(member.get("max_context_tokens") or sys.maxsize, policy.max_context_tokens)
        traits = replace(
            type(self).traits,
            dtype=dtype,
            weights_root=self._folder.weights,
            outlives_run=bool(urls),
            max_context_tokens=self._room,
            keeps_order=is_shared and not urls,
        )
        fixed = None if concurrency == "adaptive" else concurrency or DEFAULT_CONCURRENCY
        super().__init__(rules, traits, fixed, stalled_s, on_event)
        one_thread = {"OMP_NUM_THREADS": "1"} if is_shared else {}  # a process without other threads forks safely
        precision = compute_dtype and str(compute_dtype).partition(".")[2]
        given = {"model": model_of(policy), "engine": self._of, "options": member, "compute_dtype": precision}
        threads = max(1, team_size() // rules.replicas[1])
        self._server = ForkServer(
            "podium.server.serve:PoolWorker",
            {"given": given, "threads": threads, "root": str(self._folder.weights)},
            is_shared=is_shared,
            start_s=start_s,
            environment={"TOKENIZERS_PARALLELISM": "false", **one_thread},
            leftovers=[self._folder.path],
        )
        self._held: list[Path] = []
        self._claimed: tuple[str, str] | None = None
        # Early, and an error comes again when the first worker is started.
        asyncio.run_coroutine_threadsafe(self._server.start(), self._thread.loop)

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

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Answer:
        check_room(request, self._room)  # in a batch this request would fail the others too
        return await super().generate(request, on_tokens)

    async def load_folder(self, folder: Path, version: int) -> None:
        await self._thread.call(self._push_folder(folder, version))
        self.policy_version = version

    async def claim(self, run_id: str, scope: str) -> None:
        """For servers only: their owner may want the old weights back."""
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
        """Links the folder until the next push, for members that start later."""
        held = self._folder.weights / f"pool-{folder.name}"
        await asyncio.to_thread(hold, folder, held)
        try:
            await self._push(Weights(held, version))
        except BaseException:
            await asyncio.to_thread(remove_published, held)
            raise
        for old in self._held:
            await asyncio.to_thread(remove_published, old)
        self._held = [held]

    def _start(self) -> None:
        self._pool.start(self._launch if self._of else None, [(url, partial(self._join, url)) for url in self._urls])

    async def _launch(self, name: str) -> "LocalWorker":
        path, scratch = self._folder.sockets / f"{name}.sock", self._folder.path / "t" / name
        scratch.mkdir(parents=True)
        worker: LocalWorker | None = None
        try:
            worker = LocalWorker(await self._server.fork({"TMPDIR": str(scratch)}), path, scratch)
            await worker.child.call("listen", str(path).encode(), self._server.start_s)
            worker.engine = await asyncio.to_thread(self._connect, f"unix:{path}")
            return worker
        except RemoteError as error:
            raise EngineError(f"no worker could be started: {error}; see stderr") from None
        finally:
            if worker is not None and worker.engine is None:
                await worker.end()

    async def _join(self, url: str, name: str) -> "ServerWorker":
        engine = await asyncio.to_thread(self._connect, url)
        if self._claimed is not None:
            await engine.claim(*self._claimed)
        return ServerWorker(self._server, engine)

    def _connect(self, url: str) -> VllmServer:
        """Waits for the server's first answer; call it in a thread of its own."""
        token_file = None if url.startswith("unix:") else self._token_file
        limits = {"timeout_s": self._request_s, "concurrency": MAX_CALLS}
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


class ServedWorker:
    """An engine behind a server."""

    pid: int | None = None
    engine: Any = None
    """The client of the server; None before the server answers."""

    async def ping(self) -> None:
        await self.engine.ping()

    async def load(self, folder: Path, version: int) -> None:
        await self.engine.load_folder(folder, version)


class LocalWorker(ServedWorker):
    """A process of the pool's own. What its engine leaves in the `scratch` folder goes with the process."""

    def __init__(self, child: Child, path: Path, scratch: Path) -> None:
        self.pid: int | None = child.pid
        self.child, self._path, self._scratch = child, path, scratch

    async def exited(self) -> str:
        return await self.child.ended()

    async def end(self) -> None:
        await self.child.bury()
        if self.engine is not None:
            await self.engine.disconnect()
        self._path.unlink(missing_ok=True)
        await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)


class ServerWorker(ServedWorker):
    """A server that runs already, and goes on after the pool."""

    def __init__(self, forks: ForkServer, engine: Any) -> None:
        self.engine, self._forks = engine, forks

    async def load(self, folder: Path, version: int) -> None:
        """From a copy under the server's own root, unless the server reads from the pool's folder."""
        root = self.engine.traits.weights_root
        if root.resolve() == folder.parent.resolve():
            await super().load(folder, version)
            return
        copied = root / folder.name
        leftovers = copied, manifest_of(copied)
        await self._forks.remember(*leftovers)
        try:
            await asyncio.to_thread(hold, folder, copied)
            await super().load(copied, version)
        finally:
            await asyncio.to_thread(remove_published, copied)
            await self._forks.forget(*leftovers)

    async def exited(self) -> str:
        """Never: the end of a server shows in its pings."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError("unreachable")

    async def end(self) -> None:
        await self.engine.disconnect()


class PoolFolder:
    """The sockets of a pool's workers and the weights that they load. Private to this user, and locked as long as this
    process lives."""

    def __init__(self) -> None:
        place = Path(tempfile.gettempdir())
        if len(os.fsencode(place)) > LONGEST_SOCKET - 60:
            place = Path("/tmp")
        sweep(place)
        new = Path(tempfile.mkdtemp(prefix=f".{FOLDER_PREFIX}", dir=place))  # 0700
        self._lock = (new / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = new.with_name(new.name.removeprefix("."))
        new.rename(self.path)
        self.weights, self.sockets = self.path / "weights", self.path / "sockets"
        self.weights.mkdir()
        self.sockets.mkdir()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def sweep(place: Path) -> None:
    """Removes the folders of pools whose driver and fork server were killed together: nobody locks them any more."""
    for folder in place.glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError), (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def hold(published: Path, held: Path) -> None:
    """Publishes the folder a second time as `held`, by links where possible. It stays when the first is removed."""
    held.mkdir()
    try:
        for path in published.iterdir():
            _link(path, held / path.name)
        _link(manifest_of(published), manifest_of(held))
    except FileNotFoundError:
        shutil.rmtree(held)
        raise WeightsError(f"there are no weights called {published.name}") from None


def _link(path: Path, new: Path) -> None:
    try:
        os.link(path, new)
    except FileNotFoundError:
        raise
    except OSError:  # another file system
        shutil.copyfile(path, new)


def model_of(policy: Policy) -> dict[str, Any]:
    """The `[model]` section from which a worker loads the same base, with an empty adapter of the same shape."""
    lora: Any = False
    if policy.peft is not None:
        config = policy.peft.peft_config["default"]
        targets = config.target_modules
        targets = targets if isinstance(targets, str) else sorted(targets)
        lora = {"r": config.r, "alpha": config.lora_alpha, "targets": targets}
    return {
        "name": policy.source,
        "dtype": str(policy.model.dtype).removeprefix("torch."),
        "device": policy.device.type,
        "lora": lora,
        "trust_remote_code": type(policy.model).__module__.startswith("transformers_modules"),
    }


def num_processes(options: Mapping[str, Any]) -> int:
    """Most processes that a pool with these options starts."""
    return (options["replicas"] or DEFAULT_REPLICAS)[1] if options["of"] or not options["urls"] else 0
