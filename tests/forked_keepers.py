"""What podium/remote/fork_server.py starts as fresh interpreters, by forks of the job itself: they have torch already.

A job of tests/fork_server.py that names `tests.forked_keepers:instead_of_interpreters` under "prepare" has it. The
forks are made right then, while the job has one thread and has loaded nothing; each waits until it is needed, and ends
with the job. What Python does before the first line of Podium has tests of its own (remote/test_fork_server.py).

A process that was not started afresh does not show its environment in /proc. So that tests find these and their
children, each holds a file in memory open whose name is the variable FORKED_KEEPERS.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any

from podium.remote import fork_server
from podium.remote.fork_server_process import main

MARK = "FORKED_KEEPERS"
SPARES = 6
"""As many as a job's pool starts, one after the other; any more are fresh interpreters."""
MAX_MESSAGE = 1 << 17
POLL_S = 0.005

_spares: list["Spare"] = []


def instead_of_interpreters() -> None:
    for _ in range(SPARES):
        _spares.append(Spare())
    fork_server.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=start, TimeoutExpired=subprocess.TimeoutExpired
    )


def start(command: list[str], **options: Any) -> Any:
    """In place of subprocess.Popen."""
    return _spares.pop(0).wake(**options) if _spares else subprocess.Popen(command, **options)


class Spare:
    """A fork that waits. Awake it is what subprocess.Popen would have returned."""

    returncode: int | None = None

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.pid = os.fork()
            if self.pid == 0:
                for each in (*_spares, self):
                    each._socket.close()
                serve(theirs)

    def wake(self, *, stdin: Any, stdout: int, pass_fds: list[int], env: dict[str, str], **_: Any) -> "Spare":
        message = json.dumps({"given": json.loads(stdin.read()), "environment": env}).encode()
        with self._socket:
            socket.send_fds(self._socket, [message], [stdout, *pass_fds])
        return self

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or 3600)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            time.sleep(POLL_S)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def serve(control: socket.socket) -> None:
    """In the fork; never returns."""
    code = 1
    try:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE, 2)
        if message:
            if MARK in os.environ:
                os.memfd_create(os.environ[MARK])
            sent = json.loads(message)
            os.setsid()
            for number in (1, 2):
                os.dup2(descriptors[0], number)
            os.environ.clear()
            os.environ.update(sent["environment"])
            tempfile.tempdir = None  # as the environment says
            sys.path[:] = sent["given"]["path"]
            main(sent["given"] | {"control": descriptors[1]})
        code = 0
    finally:
        os._exit(code)


def holds_mark(folder: str, mark: str) -> bool:
    """Whether the process with that folder in /proc is one of those, or a child of one, of the job with that mark."""
    wanted = f"/memfd:{mark} (deleted)"
    for name in os.listdir(f"{folder}/fd"):
        try:
            if os.readlink(f"{folder}/fd/{name}") == wanted:
                return True
        except OSError:  # closed by now
            continue
    return False
