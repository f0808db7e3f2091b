"""What sits at the other end of a pool's members: a process of ours, reached by a unix socket, or a server."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from podium.engine.members.engine_pool import EngineWorker
from podium.engine.members.folder import PoolFolder, hold
from podium.errors import EngineError
from podium.model.handoff import manifest_of, remove_published
from podium.model.load import Policy
from podium.remote.fork_server import Child, ForkServer, RemoteError

PING_S = 30.0
Connect = Callable[[str], Any]
"""From an address to the engine there; waits for its first answer."""


def model_of(policy: Policy) -> dict[str, Any]:
    """The `[model]` section from which a worker loads the same base, with an empty adapter of the same shape."""
    lora: Any = False
    if policy.peft is not None:
        config = policy.peft.peft_config["default"]
        targets = config.target_modules
        lora = {
            "r": config.r,
            "alpha": config.lora_alpha,
            "targets": targets if isinstance(targets, str) else sorted(targets),
        }
    return {
        "name": policy.source,
        "dtype": str(policy.model.dtype).removeprefix("torch."),
        "device": policy.device.type,
        "lora": lora,
        "trust_remote_code": type(policy.model).__module__.startswith("transformers_modules"),
    }


class Pinger:
    """Asks a server's event loop whether it is there, on connections of its own."""

    def __init__(self, url: str) -> None:
        path = url.removeprefix("unix:") if url.startswith("unix:") else None
        transport = httpx.AsyncHTTPTransport(uds=path) if path else None
        base = "http://worker" if path else url
        self._client = httpx.AsyncClient(transport=transport, base_url=base, timeout=PING_S, trust_env=False)

    async def ping(self) -> None:
        try:
            response = await self._client.get("/health")
        except httpx.HTTPError as error:
            raise EngineError(f"{type(error).__name__}: {error}") from None
        if response.status_code != 200:
            raise EngineError(f"its health is {response.status_code}")

    async def close(self) -> None:
        await self._client.aclose()


class LocalWorker:
    """A process of the pool's own."""

    def __init__(self, child: Child, path: Path, scratch: Path) -> None:
        self.engine: Any = None
        self.pid: int | None = child.pid
        self._child, self._path, self._scratch = child, path, scratch
        self._pinger = Pinger(f"unix:{path}")

    async def ping(self) -> None:
        await self._pinger.ping()

    async def load(self, folder: Path, version: int) -> None:
        await self.engine.load_folder(folder, version)

    async def exited(self) -> str:
        return await self._child.ended()

    async def end(self) -> None:
        await self._child.bury()
        await self._pinger.close()
        if self.engine is not None:
            await self.engine.disconnect()
        self._path.unlink(missing_ok=True)
        await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)


class ServerWorker:
    """A server that others started; it goes on after the pool."""

    pid: int | None = None

    def __init__(self, server: ForkServer, url: str, engine: Any) -> None:
        self.engine = engine
        self._server, self._pinger = server, Pinger(url)

    async def ping(self) -> None:
        await self._pinger.ping()

    async def load(self, folder: Path, version: int) -> None:
        """Through a copy under its own root, unless it reads from the pool's."""
        root = self.engine.traits.weights_root
        if root.resolve() == folder.parent.resolve():
            await self.engine.load_folder(folder, version)
            return
        copied = root / folder.name
        leftovers = copied, manifest_of(copied)
        await self._server.remember(*leftovers)
        try:
            await asyncio.to_thread(hold, folder, manifest_of(folder), copied)
            await self.engine.load_folder(copied, version)
        finally:
            await asyncio.to_thread(remove_published, copied)
            await self._server.forget(*leftovers)

    async def exited(self) -> str:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody sets it")

    async def end(self) -> None:
        await self._pinger.close()
        await self.engine.disconnect()


async def start_local(server: ForkServer, folder: PoolFolder, connect: Connect, name: str) -> EngineWorker:
    """What the engine leaves in its temporary folder goes with its process."""
    path, scratch = folder.sockets / f"{name}.sock", folder.path / "t" / name
    scratch.mkdir(parents=True)
    worker: LocalWorker | None = None
    try:
        child = await server.fork({"TMPDIR": str(scratch)})
        worker = LocalWorker(child, path, scratch)
        await child.call("listen", str(path).encode(), server.start_s)
        worker.engine = await asyncio.to_thread(connect, f"unix:{path}")
        return worker
    except RemoteError as error:
        raise EngineError(f"no worker could be started: {error}; see stderr") from None
    finally:
        if worker is not None and worker.engine is None:
            await worker.end()


async def start_server(server: ForkServer, url: str, claim: tuple[str, str] | None, connect: Connect) -> EngineWorker:
    engine = await asyncio.to_thread(connect, url)
    if claim is not None:
        await engine.claim(*claim)
    return ServerWorker(server, url, engine)
