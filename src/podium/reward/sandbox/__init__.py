"""Runs an untrusted program in a sandbox and returns the verdicts on it or what it printed.

`bubblewrap`: namespaces without network, other processes or the host's files (system libraries and Python itself are
readable), a small file system in memory, an empty environment. `weak` has none of this and must be asked for by name.
Both have the limits and the seccomp filter of `inside/` and a process group that is killed when its time is up.

This process counts the threads of a program from outside, because no limit of the kernel holds: root is exempt, and a
thread without a stack of its own takes no memory of the program. So the seccomp filter stops every call that would
start a thread until this process has answered.
"""

import ast
import fcntl
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

from podium.errors import InputError
from podium.reward.sandbox.inside import launch  # importing it here also leaves it compiled for the sandbox
from podium.reward.sandbox.inside.plain import framed, from_plain, plain, receive
from podium.untrusted import warn

Sandbox = Literal["bubblewrap", "weak"]
INSIDE = Path(launch.__file__).parent
BOOT = "import sys; sys.path.insert(0, {folder!r}); from inside.launch import main; del sys.path[0]; main()"
PYTHON_FLAGS = ("-S", "-s", "-P", "-B", "-X", "utf8")
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""With a fixed hash seed, a program that prints a set prints the same every time."""
SCRATCH_BYTES = 64 << 20
OUTPUT_BYTES = 4 << 20
SYSTEM_FOLDERS = ("/bin", "/lib", "/lib32", "/lib64", "/sbin", "/usr")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/random", "/dev/urandom", "/dev/zero")


class SandboxError(Exception):
    """The sandbox itself failed, which says nothing about the program."""


@dataclass(frozen=True)
class Limits:
    test_timeout_s: float
    """For one test."""
    total_s: float
    """For all tests of a program; tests not reached by then have failed."""
    memory_mb: int
    output_bytes: int = OUTPUT_BYTES


def judge_asserts(program: str, tests: Sequence[str], limits: Limits, kind: Sandbox) -> list[bool]:
    """Whether each test passes; a test is Python code that raises if it does not pass."""
    prepared = [[test, _standard_modules(test)] for test in tests]
    passed: list[bool] = []
    end = time.monotonic() + limits.total_s
    while len(passed) < len(tests) and time.monotonic() < end:
        given = {"mode": "asserts", "program": program, **asdict(limits)}
        try:
            verdicts = _run(given, prepared[len(passed) :], end - time.monotonic(), kind)
        except SandboxError:
            if passed and time.monotonic() >= end:
                break  # the sandbox works, as earlier tests show: the time was up before it started
            raise
        passed += [verdict == "passed" for verdict in verdicts]
        if "broken" in verdicts or not verdicts:
            break
    return passed[: len(tests)] + [False] * (len(tests) - len(passed))


def run_with_inputs(program: str, inputs: Sequence[str], limits: Limits, kind: Sandbox) -> list[str | None]:
    """What the program prints for each standard input; None if it fails or exceeds its time."""
    given = {"mode": "stdio", "program": program, **asdict(limits)}
    ended = _run(given, list(inputs), limits.total_s, kind)
    printed = [output.decode(errors="replace") if code == 0 else None for code, output in ended]
    return printed[: len(inputs)] + [None] * (len(inputs) - len(printed))


def refuse_sandbox(kind: Sandbox) -> None:
    """Raises `InputError` if this machine cannot run the sandbox; warns if programs cannot have threads in it."""
    problem = _problem(kind)
    if problem is not None:
        raise InputError(
            f"sandbox = {kind!r}: {problem}. Install bubblewrap (apt-get install bubblewrap) and let the user make "
            'namespaces (in a container: --security-opt seccomp=unconfined), or ask for sandbox = "weak" in the '
            "reward's table: limits and a system call filter only, the user's files can be read and written"
        )
    if not _has_threads(kind):
        warn(
            f"warning: sandbox = {kind!r}: programs cannot start threads on this machine, and one that tries fails; it "
            "needs Linux 5.5 and a container whose runtime does not listen to seccomp filters itself"
        )


@lru_cache
def _problem(kind: Sandbox) -> str | None:
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    try:
        printed = run_with_inputs("print(input())", ["ready"], Limits(10.0, 10.0, 512), kind)
    except SandboxError as error:
        return str(error)
    return None if printed == ["ready\n"] else "a first program did not run"


@lru_cache
def _has_threads(kind: Sandbox) -> bool:
    program = "import threading; threading.Thread(target=int).start()"
    return run_with_inputs(program, [""], Limits(10.0, 10.0, 512), kind) == [""]


def _run(given: Mapping[str, Any], tests: list[Any], limit_s: float, kind: Sandbox) -> list[Any]:
    """The messages that the launcher wrote after its "ready"."""
    mine, its = socket.socketpair()
    content = framed(plain({**given, "supervisor": its.fileno()})) + framed(plain(tests))
    with (
        mine,
        its,
        _memory_file(content) as source,
        _memory_file() as sink,
        _memory_file() as complaints,
        _command(kind) as (command, folder),
    ):
        process = subprocess.Popen(
            command,
            stdin=source,
            stdout=sink,
            stderr=complaints,
            env=ENVIRONMENT,
            cwd=folder,
            process_group=0,
            pass_fds=[its.fileno()],
        )
        its.close()
        try:
            wait_and_answer(process.pid, limit_s, mine)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        sink.seek(0)
        messages = list(_messages(sink))
        if messages[:1] != [launch.READY]:
            complaints.seek(0)
            raise SandboxError(f"the sandbox did not start: {complaints.read().decode(errors='replace')[-300:]}")
    return messages[1:]


def _messages(file: BinaryIO) -> Iterator[Any]:
    """Whole messages; a launcher that was killed may have left the last one unfinished."""
    with suppress(EOFError):
        while True:
            yield from_plain(receive(file.fileno(), launch.MAX_GIVEN))


def _memory_file(content: bytes = b"") -> BinaryIO:
    """A file in memory, at its beginning. A pipe would block when it is full."""
    file = open(os.memfd_create("podium"), "w+b", buffering=0)  # noqa: SIM115  the caller closes it
    file.write(content)
    file.seek(0)
    return file


@contextmanager
def _command(kind: Sandbox) -> Iterator[tuple[list[str], str]]:
    """The command and its working folder."""
    python = [os.path.realpath(sys.executable), *PYTHON_FLAGS, "-c"]
    if kind == "bubblewrap":
        yield [*_bubblewrap(), *python, BOOT.format(folder="/podium")], "/"
        return
    with tempfile.TemporaryDirectory(prefix="podium-") as folder:
        yield [*python, BOOT.format(folder=str(INSIDE.parent))], folder


@lru_cache
def _bubblewrap() -> tuple[str, ...]:
    command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    command += [f"--unshare-{space}" for space in ("user", "ipc", "pid", "net", "uts", "cgroup-try")]
    command += ["--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    for folder in SYSTEM_FOLDERS:
        if os.path.islink(folder):
            command += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            command += ["--ro-bind", folder, folder]
    for prefix in {sys.base_prefix, sys.base_exec_prefix}:
        command += [] if prefix.startswith(SYSTEM_FOLDERS) else ["--ro-bind", prefix, prefix]
    for file in SYSTEM_FILES:
        command += ["--ro-bind-try", file, file]
    for device in DEVICES:
        command += ["--dev-bind", device, device]
    command += ["--ro-bind", str(INSIDE), f"/podium/{INSIDE.name}"]
    command += ["--size", str(SCRATCH_BYTES), "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/", "--"]
    return tuple(command)


@lru_cache
def _standard_modules(test: str) -> list[str]:
    """Modules of the standard library that a test uses as in `math.pi`, possibly without importing them."""
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError):
        return []
    bases = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    names = {base.id for base in bases if isinstance(base, ast.Name)}
    return sorted(names & sys.stdlib_module_names)


MAX_THREADS = 128
"""Per program. A program may reach up to twice as many, because its threads can ask before others that were granted
have started."""
RECEIVE, ANSWER = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV and _SEND
QUESTION = struct.Struct("=QII64x")  # struct seccomp_notif: id, thread, flags, the call
REPLY = struct.Struct("=QqiI")  # struct seccomp_notif_resp: id, value, error, flags
GO_ON = 1  # SECCOMP_USER_NOTIF_FLAG_CONTINUE
TRY_AGAIN = -11  # EAGAIN, the kernel's own error for too many threads


def wait_and_answer(pid: int, limit_s: float, launcher: socket.socket) -> None:
    """Answers questions for threads until the process has ended or its time is up.

    The first message of `launcher` brings the descriptor of the questions, or none if the kernel cannot ask.
    """
    end = time.monotonic() + limit_s
    life = os.pidfd_open(pid)  # `Popen.wait` with a limit would look again and again
    poll, questions = select.poll(), list[int]()
    poll.register(life, select.POLLIN)
    poll.register(launcher, select.POLLIN)
    num_granted = 0
    try:
        # The end of the process shows here at once, even where another process holds a copy of the socket.
        if launcher.fileno() not in [descriptor for descriptor, _ in poll.poll(max(limit_s, 0.0) * 1000)]:
            return
        with suppress(OSError):
            _, questions, _, _ = socket.recv_fds(launcher, 16, 1, socket.MSG_DONTWAIT)
        poll.unregister(launcher)
        for descriptor in questions:
            poll.register(descriptor, select.POLLIN)
        while (left_s := end - time.monotonic()) > 0:
            for descriptor, event in poll.poll(left_s * 1000):
                if descriptor == life:
                    return
                if event & select.POLLIN:
                    num_granted += _grant_thread(descriptor, num_granted)
                else:  # no process is left that could ask
                    poll.unregister(descriptor)
    finally:
        for descriptor in (life, *questions):
            os.close(descriptor)


def _grant_thread(questions: int, num_granted: int) -> bool:
    """Answers one question whether a program may start one more thread, and returns whether it may. A program that is
    killed meanwhile needs no answer."""
    with suppress(FileNotFoundError):
        number, thread, _ = QUESTION.unpack(fcntl.ioctl(questions, RECEIVE, bytes(QUESTION.size)))
        try:
            num_threads = len(os.listdir(f"/proc/{thread}/task"))
        except OSError:  # /proc hides the process: all threads that were ever granted count
            num_threads = num_granted
        is_granted = num_threads < MAX_THREADS
        reply = (number, 0, 0, GO_ON) if is_granted else (number, 0, TRY_AGAIN, 0)
        fcntl.ioctl(questions, ANSWER, REPLY.pack(*reply))
        return is_granted
    return False
