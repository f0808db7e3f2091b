"""The process behind a ForkServer, and its children.

The server makes the object, if it is shared, then forks and reaps children until the driver closes its end or is gone.
Each child leads a session of its own and dies with the server. What a child leaves behind (a daemon in a session
of its own) becomes the server's child, and the server kills it. A child calls the methods of the object:
`method(content, reply)` gets bytes and replies with bytes, as often as the driver expects.
"""

import ctypes
import gc
import importlib
import json
import os
import resource
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LENGTH = struct.Struct("<I")
"""Precedes every message between driver and child."""
DONE, FAILED = b"=", b"!"
"""First byte of a child's reply."""
CHUNK = 1 << 16
DYING_S = 3.0
MAX_MESSAGE = 1000
"""Characters of an exception that are passed on."""
MAX_GENERATIONS = 100
"""How far the children of children are followed."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Limits:
    """What one child may use; the kernel enforces it."""

    memory_mb: int
    """Address space, in addition to what the process has when the limit is set."""
    file_bytes: int
    """Size of a file that it writes."""
    open_files: int
    more_tasks: int
    """Processes and threads that the user may have in addition to those at the start; the kernel exempts root."""


def main(given: Mapping[str, Any]) -> None:
    server = Server(given)
    signal.signal(signal.SIGTERM, server.end)
    # Making the object may take forever. SIGTERM lets the server remove what the driver left; SIGKILL is surer.
    die_with_parent(os.getppid(), by=signal.SIGTERM if given["leftovers"] else signal.SIGKILL)
    if os.getppid() != given["driver"]:
        server.end()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans among its descendants become its children instead of init's
    try:
        server.prepare()
    except BaseException as error:  # whatever user code raises while it is imported
        server.answer(_described(error))
        return
    _prctl(PR_SET_PDEATHSIG, 0)  # it is about the thread that started this process; from now on the server looks itself
    server.answer(None)
    server.serve()


class Server:
    """Answers the driver, one question at a time."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given, self._driver = given, given["driver"]
        self._control = socket.socket(fileno=given["control"])
        self._leftovers: set[str] = set(given["leftovers"])
        self._limits = Limits(**given["limits"]) if given["limits"] else None
        self._max_tasks = num_tasks_of_user() + self._limits.more_tasks if self._limits else 0
        self._children: set[int] = set()
        self._is_closed = False
        """By the driver, which then removes its files itself."""
        self._make = self._make_object
        self._answers: dict[str, Callable[..., Any]] = {
            "fork": self._fork,
            "bury": self._bury,
            "remember": self._leftovers.update,
            "forget": self._leftovers.difference_update,
        }

    def prepare(self) -> None:
        if self._given["is_shared"]:
            made = self._make_object()
            self._make = lambda: made
            gc.freeze()  # the collector of a child would copy every page that it visits

    def answer(self, answer: Any) -> None:
        self._control.send(json.dumps(answer).encode())

    def serve(self) -> None:
        """Until the driver closes its end, or is gone."""
        self._control.settimeout(1.0)  # the socket may have been inherited by another child of a driver that is gone
        while os.getppid() == self._driver:
            try:
                message, descriptors, _, _ = socket.recv_fds(self._control, CHUNK, 1)
            except TimeoutError:
                continue
            except OSError:
                break
            if not message:
                break
            [(question, content)] = json.loads(message).items()
            if question == "close":
                self._is_closed = True
                break
            self.answer(self._answers[question](content, *descriptors))
        self.end()

    def end(self, *_: object) -> None:
        """Kills every child; removes what the driver left, if that is gone."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for child in list(self._children):
            self._bury(child)
        kill_strays(())
        if self._leftovers and not self._is_closed and self._is_alone():
            for path in map(Path, self._leftovers):
                path.unlink(missing_ok=True) if path.is_file() else shutil.rmtree(path, ignore_errors=True)
        os._exit(0)

    def _is_alone(self) -> bool:
        """Whether the driver is gone. Its sockets close and its threads end a moment before the process does."""
        deadline = time.monotonic() + DYING_S
        while os.getppid() == self._driver and time.monotonic() < deadline:
            time.sleep(0.02)
        return os.getppid() != self._driver

    def _bury(self, child: int) -> int | None:
        if child not in self._children:
            return None
        self._children.discard(child)
        return bury(child, self._children)

    def _fork(self, environment: Mapping[str, str], descriptor: int) -> int | str:
        """The child's process number, or why there is none."""
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(descriptor)
            return f"cannot fork: {error.strerror}"
        if pid == 0:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                die_with_parent(server)
                os.setsid()
                self._control.close()
                os.environ.update(environment)
                tempfile.tempdir = None  # looked up again
                if self._limits is not None:
                    limit_resources(self._limits, self._max_tasks)
                serve(Connection(descriptor), self._make)
            except BaseException:
                traceback.print_exc(file=sys.stderr)
            finally:
                sys.stderr.flush()
                os._exit(1)
        os.close(descriptor)
        self._children.add(pid)
        return pid

    def _make_object(self) -> Any:
        module, _, name = self._given["recipe"].partition(":")
        return getattr(importlib.import_module(module), name)(**self._given["arguments"])


class Connection:
    """A child's end: whole messages."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._pid = descriptor, os.getpid()
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        self._calls = self._socket.makefile("rb")

    def reply(self, content: bytes) -> None:
        self._send(DONE + content)

    def fail(self, error: Exception) -> None:
        self._send(FAILED + _described(error).encode(errors="replace"))

    def receive(self) -> tuple[str, bytes]:
        """The next call: a method's name and the content. The process ends when the driver closed its end."""
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        name, _, content = self._read(length).partition(b"\n")
        return name.decode(), content

    def _send(self, message: bytes) -> None:
        if os.getpid() != self._pid:  # the object forked, and that process returned here as well
            os._exit(1)
        try:
            self._socket.sendall(LENGTH.pack(len(message)) + message)
        except (BrokenPipeError, ConnectionResetError):  # the driver has let this child go
            os._exit(0)

    def _read(self, count: int) -> bytes:
        content = self._calls.read(count)
        if len(content) < count:
            os._exit(0)
        return content


def serve(connection: Connection, make: Callable[[], Any]) -> None:
    """Makes the object, says so, and calls its methods."""
    try:
        served = make()
    except Exception as error:
        connection.fail(error)
        raise
    connection.reply(b"")
    while True:
        name, content = connection.receive()
        try:
            getattr(served, name)(content, connection.reply)
        except Exception as error:
            connection.fail(error)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_MESSAGE]


# ---- what only the Linux kernel can promise


def die_with_parent(parent: int, by: int = signal.SIGKILL) -> None:
    """This process gets the signal as soon as the thread that started it ends, for whatever reason."""
    _prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def children() -> list[int]:
    """Processes whose parent this one is."""
    me = os.getpid()
    with open(f"/proc/{me}/task/{me}/children") as file:
        return [int(pid) for pid in file.read().split()]


def bury(worker: int, others: Collection[int]) -> int:
    """Kills a child's process group and what escaped from it. Returns its exit status, negative for a signal.

    A dead child stays a zombie until now, so no other process can have its number. `others` are the children that stay.
    """
    with suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)  # it may not lead a group yet
    _, status = os.waitpid(worker, 0)
    kill_strays(others)
    return os.waitstatus_to_exitcode(status)


def kill_strays(others: Collection[int]) -> None:
    """Kills processes that left their worker's group: they became this one's children when their parents died."""
    for _ in range(MAX_GENERATIONS):
        strays = [child for child in children() if child not in others]
        for stray in strays:
            with suppress(ProcessLookupError):
                os.kill(stray, signal.SIGKILL)
            os.waitpid(stray, 0)  # its own children are this process's from now on
        if not strays:
            return


def limit_resources(limits: Limits, max_tasks: int) -> None:
    """Limits this process and its descendants. `max_tasks` counts all processes and threads of the user."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    most = {
        resource.RLIMIT_AS: used + (limits.memory_mb << 20),
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_NPROC: max_tasks,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in most.items():
        _, hard = resource.getrlimit(kind)
        least = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (least, least))


def limit_processor_time(seconds: float) -> None:
    """From now on. The kernel ends a process that computes, even if its driver is too busy to do so; the driver ends
    one that waits."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime + seconds) + 2
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def num_tasks_of_user() -> int:
    """Processes and threads that the kernel counts against this user."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # gone in the meantime
            continue
    return count


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
