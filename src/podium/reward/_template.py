"""The driver's end of the template process, which forks reward workers and buries them."""

import asyncio
import codecs
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from podium.errors import RewardFailedError
from podium.terminal import printable

START_S = 120.0
"""For the template to import the rewards, and for a worker to say that it is there."""
BURIAL_S = 10.0
FLUSH_S = 2.0
"""For the last prints of rewards."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Workers share the cores between them; and a process without other threads forks safely."""
BOOT = """
import json, os, sys
given = json.load(sys.stdin)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
sys.path[:] = given["path"]
from podium.reward._worker_process import main
main(given)
"""


class Relay:
    """Hands what rewards print on to the standard error, as text that a terminal can show.

    Workers do not write there themselves: it may be a file that is larger than they may write.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._thread = threading.Thread(target=self._run, name="prints of rewards", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """When the writers have ended; one that escaped may hold the other end open."""
        self._thread.join(timeout=FLUSH_S)

    def _run(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        with open(self._descriptor, "rb", buffering=0) as prints:
            while data := prints.read(1 << 16):
                _write(printable(decoder.decode(data)))


def _write(text: str) -> None:
    """A full disk loses prints, and nothing else."""
    data = text.encode("utf-8", "backslashreplace")
    with suppress(OSError):
        while data:
            data = data[os.write(2, data) :]


class Template:
    """Started when the first worker is needed, and again should it die."""

    def __init__(self, recipes: Sequence[Mapping[str, Any]], memory_mb: int) -> None:
        self._recipes, self._memory_mb = list(recipes), memory_mb
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._relay: Relay | None = None
        self._starting, self._burying = asyncio.Lock(), asyncio.Lock()

    async def fork(self) -> socket.socket:
        """A socket to a new worker, which is closed at the other end if there is no room for one."""
        control = await self._started()
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        with theirs, suppress(OSError):
            socket.send_fds(control, [b"fork"], [theirs.fileno()])
        return mine

    async def bury(self, pid: int) -> int | None:
        """The exit status of a killed or dead worker, negative for a signal; None if the template died too."""
        loop, control = asyncio.get_running_loop(), self._control
        if control is None:
            return None
        async with self._burying:
            try:
                async with asyncio.timeout(BURIAL_S):
                    await loop.sock_sendall(control, str(pid).encode())
                    while True:
                        buried, status = json.loads(await loop.sock_recv(control, 64))
                        if buried == pid:
                            return status
            except (OSError, ValueError):
                return None

    def close(self) -> None:
        """The template sees its socket closed, kills every worker and ends."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=BURIAL_S)
            self._process.kill()
            self._process.wait()
        if self._relay is not None:
            self._relay.close()
        self._control = self._process = self._relay = None

    async def _started(self) -> socket.socket:
        async with self._starting:
            if self._process is not None and self._process.poll() is not None:
                self.close()
            if self._control is None:
                self._control = await self._start()
            return self._control

    async def _start(self) -> socket.socket:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.setblocking(False)
        given = {"driver": os.getpid(), "control": theirs.fileno(), "path": sys.path}
        given |= {"rewards": self._recipes, "memory_mb": self._memory_mb}
        prints_out, prints_in = os.pipe()
        with theirs, tempfile.TemporaryFile() as file, os.fdopen(prints_in, "wb") as prints:
            file.write(json.dumps(given).encode())
            file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT],
                stdin=file,
                stdout=prints,  # a reward's prints must not mix with the run's own output
                stderr=prints,
                pass_fds=[theirs.fileno()],
                env=os.environ | ONE_THREAD,
                start_new_session=True,  # an interrupt from the keyboard is for the driver alone
            )
        self._relay = Relay(prints_out)
        try:
            problem = await self._greeted(mine)
        except BaseException:
            mine.close()
            raise
        if problem is not None:
            mine.close()
            raise RewardFailedError(f"reward workers cannot be started: {problem}")
        return mine

    async def _greeted(self, control: socket.socket) -> str | None:
        """What is wrong with the rewards, if anything."""
        try:
            async with asyncio.timeout(START_S):
                answer = await asyncio.get_running_loop().sock_recv(control, 4096)
        except TimeoutError:
            return f"importing the rewards took more than {START_S:g} s"
        except OSError:
            answer = b""
        return json.loads(answer)["error"] if answer else "their process died, see stderr"
