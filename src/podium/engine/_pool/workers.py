"""What sits at the other end of a pool's members: a process of ours, reached by a unix socket, or a server."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from podium.engine._pool.keeper import Keeper, hold
from podium.engine._pool.members import Worker
from podium.errors import EngineError
from podium.model.handoff import manifest_of, remove_published
from podium.model.load import Policy
from podium.processes import how_it_ended

PING_S = 30.0
READY_PAUSE_S = 0.05
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
        "exact_sums": policy.exact_sums,
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
    """A child of the keeper."""

    def __init__(self, keeper: Keeper, pid: int, path: Path) -> None:
        self.engine: Any = None
        self.pid: int | None = pid
        self._keeper, self._keeper_pid = keeper, keeper.pid
        self._path, self._pid = path, pid
        self._pinger = Pinger(f"unix:{path}")
        self._burial: asyncio.Task[int | None] | None = None

    async def ping(self) -> None:
        await self._pinger.ping()

    async def load(self, folder: Path, version: int) -> None:
        await self.engine.load_folder(folder, version)

    async def exited(self) -> str:
        with suppress(ProcessLookupError):  # then it was buried already, or went with the keeper
            await _end_of(self._pid)
        return how_it_ended(await self._bury())

    async def end(self) -> None:
        await self._bury()
        await self._pinger.close()
        if self.engine is not None:
            await self.engine.disconnect()
        self._path.unlink(missing_ok=True)

    async def ready(self, connect: Connect) -> None:
        """Waits until it answers; `EngineError` if it ends before that."""
        ending, answering = asyncio.ensure_future(self.exited()), asyncio.ensure_future(self._answering())
        try:
            await asyncio.wait((ending, answering), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise EngineError(f"{ending.result()} before it was ready, see stderr")
            self.engine = await asyncio.to_thread(connect, f"unix:{self._path}")
        finally:
            for task in (ending, answering):
                task.cancel()
            await asyncio.gather(ending, answering, return_exceptions=True)

    async def _answering(self) -> None:
        while True:
            with suppress(EngineError):
                await self._pinger.ping()
                return
            await asyncio.sleep(READY_PAUSE_S)

    async def _bury(self) -> int | None:
        if self._burial is None:
            self._burial = asyncio.ensure_future(self._keeper.bury(self._pid, self._keeper_pid))
        return await asyncio.shield(self._burial)


class ServerWorker:
    """A server that others started; it goes on after the pool."""

    pid: int | None = None

    def __init__(self, keeper: Keeper, url: str, engine: Any) -> None:
        self.engine = engine
        self._keeper, self._pinger = keeper, Pinger(url)

    async def ping(self) -> None:
        await self._pinger.ping()

    async def load(self, folder: Path, version: int) -> None:
        """Through a copy under its own root, unless it reads from the pool's."""
        if self.engine.weights_root.resolve() == folder.parent.resolve():
            await self.engine.load_folder(folder, version)
            return
        copied = self.engine.weights_root / folder.name
        await self._keeper.remember(copied)
        try:
            await asyncio.to_thread(hold, folder, manifest_of(folder), copied)
            await self.engine.load_folder(copied, version)
        finally:
            await asyncio.to_thread(remove_published, copied)
            await self._keeper.forget(copied)

    async def exited(self) -> str:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody sets it")

    async def end(self) -> None:
        await self._pinger.close()
        await self.engine.disconnect()


async def start_local(keeper: Keeper, sockets: Path, connect: Connect, name: str) -> Worker:
    path = sockets / f"{name}.sock"
    worker = LocalWorker(keeper, await keeper.start(path), path)
    try:
        await worker.ready(connect)
    except BaseException:
        await worker.end()
        raise
    return worker


async def start_server(keeper: Keeper, url: str, claim: tuple[str, str] | None, connect: Connect) -> Worker:
    engine = await asyncio.to_thread(connect, url)
    if claim is not None:
        await engine.claim(*claim)
    return ServerWorker(keeper, url, engine)


async def _end_of(pid: int) -> None:
    """Of any process, a child or not."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
