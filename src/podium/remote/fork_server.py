"""Runs an object in processes of its own: the driver's end.

    driver ── ForkServer ──► a fresh interpreter, which forks and reaps children (fork_server_process.py)
       │                          │
       └───── Child ────────► children, each of which serves the object: calls by name, replies as bytes

The object is what `recipe` ("module:function") returns for `arguments`. If it is shared, the server makes it before the
first fork: a child starts in milliseconds and shares its memory. Otherwise each child makes its own, which is necessary
where the object uses CUDA: a process must not be forked after CUDA was initialised.

The death of a child is noticed at once. A child is killed with its process group and what escaped from that. When the
driver is gone, for whatever reason, the server kills all children and removes the driver's `leftovers`.
"""

import asyncio
import codecs
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from podium.remote.fork_server_process import CHUNK, DONE, FAILED, LENGTH, Limits
from podium.remote.tasks import LoopThread
from podium.untrusted import printable

ANSWER_S = 20.0
"""For a fork or a burial."""
CLOSE_S = 10.0
FLUSH_S = 2.0
"""For the last prints of children."""
MAX_REPLY = (1 << 32) - 1
BOOT = """
import json, os, sys
given = json.load(sys.stdin)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
sys.path[:] = given["path"]
from podium.remote.fork_server_process import main
main(given)
"""


class RemoteError(Exception):
    """A failure of a process, other than a TimeoutError; also when the system allows no further child."""


class StartError(RemoteError):
    """The server cannot be started."""


class CallError(RemoteError):
    """The object raised an exception; the message names it."""


class GarbledError(RemoteError):
    """A child sent something that is not a reply."""


class DiedError(RemoteError):
    """The child died. The message says how; `status` is its exit status, or None if it is unknown."""

    def __init__(self, status: int | None) -> None:
        super().__init__(how_it_ended(status))
        self.status = status


class ForkServer:
    """Starts when the first child is needed, and again if it died. Lives in one event loop at a time.

    `environment` is added to the server's and its children's own; `limits` are set for each child by the kernel;
    `output` is the descriptor that they print to; `leftovers` are removed if the driver dies without closing.
    """

    def __init__(
        self,
        recipe: str,
        arguments: Mapping[str, Any],
        *,
        is_shared: bool,
        start_s: float,
        environment: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        output: int = 2,
        leftovers: Sequence[Path] = (),
    ) -> None:
        self._given = {
            "recipe": recipe,
            "arguments": dict(arguments),
            "is_shared": is_shared,
            "limits": asdict(limits) if limits else None,
            "leftovers": [str(path) for path in leftovers],
        }
        self.start_s, self._environment, self._output = start_s, dict(environment or {}), output
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._one_at_a_time = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Before the first child is needed."""
        async with self._one_at_a_time:
            await self._started()

    async def fork(self, environment: Mapping[str, str] | None = None) -> "Child":
        """A child that has the object. A CallError if it cannot make the object; another RemoteError if there is no
        child, such as a StartError; a TimeoutError after `start_s`."""
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        try:
            server, pid = await asyncio.shield(self._request_child(theirs, environment or {}))
            child = Child(self, server, pid, mine)
        except BaseException:
            mine.close()  # the child sees that and ends
            raise
        try:
            await child.receive(self.start_s)
        except BaseException:
            await child.bury()
            raise
        return child

    async def bury(self, pid: int, server: int | None) -> int | None:
        """Kills a child and what it started. Returns its exit status, negative for a signal; None if the `server` that
        forked it is gone, and the child with it."""
        if self._process is None or self._process.pid != server or self._process.poll() is not None:
            return None
        try:
            return await self._ask({"bury": pid})
        except RemoteError:
            return None

    async def remember(self, *leftovers: Path) -> None:
        """Adds files or folders that are to be removed if the driver dies."""
        await asyncio.shield(self._ask({"remember": [str(path) for path in leftovers]}))

    async def forget(self, *leftovers: Path) -> None:
        await asyncio.shield(self._ask({"forget": [str(path) for path in leftovers]}))

    def close(self) -> None:
        """The server kills every child and ends."""
        if self._control is not None:
            with suppress(OSError):
                self._control.send(b'{"close": null}')
            self._control.close()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=CLOSE_S)
            self._process.kill()
            self._process.wait()
        self._control = self._process = None

    async def _request_child(self, theirs: socket.socket, environment: Mapping[str, str]) -> tuple[int | None, int]:
        """The process numbers of the server and of its new child."""
        with theirs:
            answer = await self._ask({"fork": dict(environment)}, theirs.fileno())
        if isinstance(answer, str):
            raise RemoteError(answer)
        return self.pid, answer

    async def _ask(self, question: Mapping[str, Any], *descriptors: int) -> Any:
        """Must not be cancelled before the answer: the next question would read it."""
        async with self._one_at_a_time:
            control = await self._started()
            try:
                socket.send_fds(control, [json.dumps(question).encode()], descriptors)
                return json.loads(await _message(control, ANSWER_S))
            except (OSError, ValueError):
                self._kill()  # it is frozen or gone; its children die with it
                raise RemoteError("the process that forks them died") from None

    async def _started(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._control is None:
            try:
                await self._start()
            except BaseException:
                self._kill()
                raise
        assert self._control is not None
        return self._control

    async def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        here = {"driver": os.getpid(), "control": theirs.fileno(), "path": sys.path}
        with theirs, tempfile.TemporaryFile() as file:
            file.write(json.dumps(self._given | here).encode())
            file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, self._given["recipe"]],
                stdin=file,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[theirs.fileno()],
                env=os.environ | self._environment,
                start_new_session=True,  # an interrupt from the keyboard is for the driver alone
            )
        try:
            problem = json.loads(await _message(self._control, self.start_s))
        except TimeoutError:
            problem = f"the process that forks them was not ready within {self.start_s:g} s"
        except (OSError, ValueError):
            problem = "the process that forks them died, see stderr"
        if problem is not None:
            raise StartError(problem)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self.close()


class Child:
    """A process that serves the object. What it sends is not trusted, since it may run a user's code."""

    def __init__(self, server: ForkServer, server_pid: int | None, pid: int, end: socket.socket) -> None:
        self.pid = pid
        self._server, self._server_pid, self._socket = server, server_pid, end
        self._received = bytearray()
        self._burial: asyncio.Future[int | None] | None = None
        try:
            self._life: int | None = os.pidfd_open(pid)
        except ProcessLookupError:  # it died with the server
            raise DiedError(None) from None

    @property
    def is_alive(self) -> bool:
        """A process's descriptor can be read once the process has ended."""
        if self._life is None:
            return False
        poll = select.poll()  # `select.select` takes no descriptors above 1023
        poll.register(self._life, select.POLLIN)
        return not poll.poll(0)

    @property
    def has_sent_more(self) -> bool:
        """Whether bytes have arrived after the last reply."""
        return bool(self._received)

    async def call(self, method: str, content: bytes, limit_s: float) -> bytes:
        """The one reply to a call: as `send` and `receive`."""
        await self.send(method, content, limit_s)
        return await self.receive(limit_s)

    async def send(self, method: str, content: bytes, limit_s: float) -> None:
        """Calls a method of the object. TimeoutError if the child does not read the call; `receive` notices a dead
        child."""
        message = method.encode() + b"\n" + content
        async with asyncio.timeout(limit_s):
            with suppress(OSError):
                await asyncio.get_running_loop().sock_sendall(self._socket, LENGTH.pack(len(message)) + message)

    async def receive(self, limit_s: float, max_bytes: int = MAX_REPLY) -> bytes:
        """The next reply. TimeoutError, CallError, GarbledError, or DiedError: then the child is buried already.

        Replies count that arrived before the child died, or in time while this event loop was busy.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while (reply := self._whole_reply(max_bytes)) is None:
            await self._wait(deadline - loop.time())
            try:
                chunk = self._socket.recv(CHUNK)
            except OSError:  # also BlockingIOError: only the process's end was there to be read
                chunk = b""
            if not chunk:
                raise DiedError(await self.bury())
            self._received += chunk
        if reply[:1] == FAILED:
            raise CallError(reply[1:].decode(errors="replace"))
        return reply[1:]

    async def ended(self) -> str:
        """Waits for the end of the process and says how it ended."""
        if self._life is not None:
            life = os.dup(self._life)
            try:
                await _readable([life], None)
            finally:
                os.close(life)
        return how_it_ended(await self.bury())

    async def bury(self) -> int | None:
        """Kills it with what it started. Returns its exit status, negative for a signal, or None if its server is
        gone."""
        if self._burial is None:
            self.kill()
            self._burial = asyncio.ensure_future(self._server.bury(self.pid, self._server_pid))
        return await asyncio.shield(self._burial)

    def kill(self) -> None:
        """Kills the process group, at once. Until the burial the server keeps the number from being reused."""
        if self._life is None:
            return
        assert self.pid > 1  # 0 would be the driver's own group
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """A child that waits for a call sees that and ends."""
        self._socket.close()
        if self._life is not None:
            os.close(self._life)
        self._life = None

    def _whole_reply(self, max_bytes: int) -> bytes | None:
        if len(self._received) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._received)
        end = LENGTH.size + length
        if not 0 < length <= max_bytes:
            raise GarbledError("a reply of a wrong length")
        if len(self._received) < end:
            return None
        reply = bytes(self._received[LENGTH.size : end])
        del self._received[:end]
        if reply[:1] not in (DONE, FAILED):
            raise GarbledError("a reply of an unknown kind")
        return reply

    async def _wait(self, limit_s: float) -> None:
        """Returns when there is something to read, or the process has ended."""
        if self._life is None:
            raise DiedError(await self.bury())
        if not await _readable([self._socket.fileno(), self._life], limit_s):
            raise TimeoutError


class BlockingChild:
    """The one child of a server, for callers that wait for each call in their own thread."""

    def __init__(self, server: ForkServer) -> None:
        """Ready once it is made; the exceptions are those of `ForkServer.fork`."""
        self._server, self._thread = server, LoopThread()
        self._child: Child | None = None
        try:
            self._child = self._thread.start(server.fork()).result()
        except BaseException:
            self.close()
            raise

    def call(self, method: str, content: bytes, limit_s: float) -> bytes:
        """As `Child.call`."""
        assert self._child is not None
        return self._thread.start(self._child.call(method, content, limit_s)).result()

    def close(self) -> None:
        """Kills the child and ends the server."""
        try:
            self._thread.finish(asyncio.sleep(0), CLOSE_S)
        finally:
            if self._child is not None:
                self._child.close()
            self._server.close()


async def _readable(descriptors: Sequence[int], limit_s: float | None) -> bool:
    """Whether one of them becomes readable in time. If the event loop was busy and both happened, it is readable."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    for descriptor in descriptors:
        loop.add_reader(descriptor, lambda: ready.done() or ready.set_result(None))
    try:
        await asyncio.wait([ready], timeout=limit_s)
    finally:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
    return ready.done()


async def _message(control: socket.socket, limit_s: float) -> bytes:
    """The server's next message; empty if the server is gone."""
    if not await _readable([control.fileno()], limit_s):
        raise TimeoutError
    return control.recv(CHUNK)


def how_it_ended(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "its process died"
    if status >= 0:
        return f"its process exited with code {status}"
    names = {each.value: each.name for each in signal.Signals}
    return f"its process was killed by {names.get(-status, f'signal {-status}')}"


class Relay:
    """Writes to the standard error what children print to `descriptor`, as text that a terminal can show.

    Children that run a user's code do not write to it themselves: it may be a terminal, which obeys control
    characters, or a file that is larger than they may write.
    """

    def __init__(self) -> None:
        self._readable, self.descriptor = os.pipe()
        self._thread = threading.Thread(target=self._run, name="prints of rewards", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Call it when the writers have ended; one that escaped may hold the descriptor open."""
        os.close(self.descriptor)
        self._thread.join(timeout=FLUSH_S)

    def _run(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        with open(self._readable, "rb", buffering=0) as prints:
            while data := prints.read(1 << 16):
                _write(printable(decoder.decode(data)))


def _write(text: str) -> None:
    """A full disk loses prints, and nothing else."""
    data = text.encode("utf-8", "backslashreplace")
    with suppress(OSError):
        while data:
            data = data[os.write(2, data) :]
