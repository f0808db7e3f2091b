"""The driver's end of the keeper: the process that starts a pool's workers and buries them.

The keeper (runtime/_keeper.py) is the parent of every local worker. With in-process engines it has loaded the model
before it forks them, so a new one is there in a moment. When the driver is gone, however it went, the keeper kills the
workers and removes the pool's folder.
"""

import asyncio
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from podium.errors import EngineError, WeightsError

ANSWER_S = 20.0
"""For a fork or a burial."""
CLOSE_S = 10.0
PREFIX = "podium-pool-"
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}
"""A process without other threads forks safely; torch's are limited in the same way, where it is forked."""
LONGEST_SOCKET = 100
"""Bytes of a unix socket's path; the kernel takes a few more."""
BOOT = """
import json, os, sys
given = json.load(sys.stdin)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
sys.path[:] = given["path"]
from podium.runtime._keeper import main
main(given)
"""


class Keeper:
    """Started when the first worker is needed, and again should it die. `given` says what workers are."""

    def __init__(self, folder: Path, given: Mapping[str, Any], start_s: float) -> None:
        self._folder, self._given, self._start_s = folder, dict(given), start_s
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._one_at_a_time = asyncio.Lock()
        self._abandoned: set[asyncio.Future[None]] = set()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def begin(self) -> None:
        """Starts the keeper before the first worker is needed; a problem is told when one is."""
        with suppress(EngineError):
            async with self._one_at_a_time:
                await self._started()

    async def start(self, path: Path) -> int:
        """The pid of a new worker, which is about to listen at the socket of that path."""
        asking = asyncio.ensure_future(self._ask({"start": str(path)}))
        try:
            answer = await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._abandoned.add(abandoning := asyncio.ensure_future(self._abandon(asking)))
            abandoning.add_done_callback(self._abandoned.discard)
            raise
        if "pid" not in answer:
            raise EngineError(f"no worker could be started: {answer.get('error')}")
        return answer["pid"]

    async def bury(self, pid: int, keeper: int | None) -> int | None:
        """Kills a worker's process group; its exit status, negative for a signal. None if the `keeper` that started it
        is gone, and the worker with it: another is not asked, which may be starting still."""
        if self._process is None or self._process.pid != keeper or self._process.poll() is not None:
            return None
        try:
            return (await asyncio.shield(self._ask({"bury": pid})))["status"]
        except EngineError:
            return None

    async def _abandon(self, asking: asyncio.Future[dict[str, Any]]) -> None:
        """Nobody waits any more for the worker that was asked for."""
        with suppress(EngineError):
            if pid := (await asking).get("pid"):
                await self.bury(pid, self.pid)

    async def remember(self, published: Path) -> None:
        """A published folder elsewhere, to be removed should the driver die."""
        await asyncio.shield(self._ask({"remember": str(published)}))

    async def forget(self, published: Path) -> None:
        await asyncio.shield(self._ask({"forget": str(published)}))

    def close(self) -> None:
        """It is told so, kills every worker and ends."""
        if self._control is not None:
            with suppress(OSError):
                self._control.send(b'{"close": true}')
            self._control.close()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=CLOSE_S)
            self._process.kill()
            self._process.wait()
        self._control = self._process = None

    async def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Not to be given up half-way: the next one would read this one's answer."""
        loop = asyncio.get_running_loop()
        async with self._one_at_a_time:
            control = await self._started()
            try:
                async with asyncio.timeout(ANSWER_S):
                    await loop.sock_sendall(control, json.dumps(question).encode())
                    answer = json.loads(await loop.sock_recv(control, 4096) or b"null")
            except (OSError, ValueError, TimeoutError):
                answer = None
            if answer is None:
                self._kill()  # frozen or gone: the workers go with it
                raise EngineError("the process that keeps the workers died")
            return answer

    async def _started(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._control is None:
            try:
                self._control = await self._start()
            except BaseException:
                self._kill()
                raise
        return self._control

    async def _start(self) -> socket.socket:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.setblocking(False)
        here = {"driver": os.getpid(), "control": theirs.fileno(), "path": sys.path, "folder": str(self._folder)}
        with theirs, tempfile.TemporaryFile() as file:
            file.write(json.dumps(here | self._given).encode())
            file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT],
                stdin=file,
                stdout=2,
                pass_fds=[theirs.fileno()],
                env=os.environ | ENVIRONMENT,
                start_new_session=True,  # an interrupt from the keyboard is for the driver alone
            )
        try:
            async with asyncio.timeout(self._start_s):
                answer = await asyncio.get_running_loop().sock_recv(mine, 4096)
        except (OSError, TimeoutError):
            answer = b""
        problem = json.loads(answer)["error"] if answer else f"it did not start within {self._start_s:g} s or died"
        if problem is not None:
            mine.close()
            raise EngineError(f"the process that keeps the workers cannot be started: {problem}")
        return mine

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self.close()


class PoolFolder:
    """Private to this user, locked by this process for as long as it lives; folders of dead ones are swept away."""

    def __init__(self) -> None:
        place = Path(tempfile.gettempdir())
        if len(os.fsencode(place)) > LONGEST_SOCKET - 60:
            place = Path("/tmp")
        sweep(place)
        new = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=place))  # 0700
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
    """Removes what pools left whose driver and keeper were killed together."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError), (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def hold(published: Path, manifest: Path, held: Path) -> None:
    """The published folder once more as `held`, by links where that works: it stays when the first is removed."""
    held.mkdir()
    try:
        for path in published.iterdir():
            _link(path, held / path.name)
        _link(manifest, held.with_name(f"{held.name}.json"))
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
