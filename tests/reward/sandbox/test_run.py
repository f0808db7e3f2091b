"""Programs that try to get out. Each probe says "escaped" if it could; outside the sandbox it can."""

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import podium.reward.sandbox as sandbox_run
from podium.errors import InputError
from podium.reward.sandbox import (
    Limits,
    Sandbox,
    SandboxError,
    _problem,
    judge_asserts,
    refuse_sandbox,
    run_with_inputs,
)
from podium.reward.sandbox.inside.limits import call_filter

pytestmark = pytest.mark.skipif(_problem("bubblewrap") is not None, reason=f"no sandbox: {_problem('bubblewrap')}")
LIMITS = Limits(test_timeout_s=20.0, total_s=60.0, memory_mb=256)
"""Of programs that end by themselves, on a busy machine too."""


@dataclass(frozen=True)
class Bait:
    """Things of the host's that a program must not reach."""

    folder: Path
    port: int
    pid: int


@pytest.fixture(scope="module")
def bait(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bait]:
    folder = tmp_path_factory.mktemp("bait")
    (folder / "secret").write_text("a secret of the host")
    listener = socket.create_server(("127.0.0.1", 0))
    local = socket.socket(socket.AF_UNIX)
    local.bind(str(folder / "socket"))
    local.listen()
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0podium-{os.getpid()}")
    abstract.listen()
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        yield Bait(folder, listener.getsockname()[1], sleeper.pid)
        assert sleeper.poll() is None, "a probe killed a process of the host"
    finally:
        sleeper.kill()
        sleeper.wait()
        for each in (listener, local, abstract):
            each.close()


# Probes that also run outside, as a proof that they would work there.
REACHING = {
    "reads a file of the host": "open({folder!r} + '/secret').read()",
    "reads it through a link": """
        import tempfile
        link = tempfile.mkdtemp() + '/link'
        os.symlink({folder!r} + '/secret', link)
        open(link).read()
    """,
    "lists a folder of the host": "os.listdir({folder!r})",
    "writes into a folder of the host": "open({folder!r} + '/written', 'w').write('x')",
    "reads the list of users": "open('/etc/passwd').read()",
    "reads the environment": "os.environ['PODIUM_BAIT']",
    "finds a process of the host": "os.kill({pid}, 0)",
    "limits another process": "import resource; resource.prlimit({pid}, resource.RLIMIT_CORE, (0, 0))",
    "moves another process": "os.sched_setaffinity({pid}, os.sched_getaffinity(0))",
    "slows another process": "os.setpriority(os.PRIO_PROCESS, {pid}, 1)",
    "looks into /proc": "open('/proc/{pid}/cmdline').read()",
    "connects to the host": "import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
    "connects to a socket in a folder": "import socket; socket.socket(socket.AF_UNIX).connect({folder!r} + '/socket')",
    "connects to a socket without a folder": """
        import socket
        socket.socket(socket.AF_UNIX).connect('\\0podium-' + {parent!r})
    """,
    "opens a port": "import socket; socket.create_server(('127.0.0.1', 0))",
    "forks": """
        if os.fork() == 0:
            os._exit(0)
    """,
    "starts a program": "import subprocess; subprocess.run(['/bin/sh', '-c', 'true'], check=True)",
    "becomes another program": "os.execv('/bin/echo', ['echo', 'escaped'])",
    "starts a process by a library": """
        import multiprocessing
        process = multiprocessing.get_context('fork').Process(target=print)
        process.start()
    """,
    "makes a file in memory": "os.memfd_create('x')",
    "leaves its session": "os.fork() or os.setsid()",
    "takes 1 GB": "x = bytearray(1 << 30); x[::4096] = x[::4096]",
    "writes 100 MB": "import tempfile; tempfile.TemporaryFile().write(bytes(100 << 20))",
    "opens 200 files": "x = [open('/dev/null') for _ in range(200)]",
}
# Probes that would do harm outside.
HARMING = {
    "kills all": "os.kill(-1, 9); time.sleep(0.2)",
    "kills its group": "os.kill(0, 9); time.sleep(0.2)",
    "kills the launcher": "os.kill(os.getppid(), 9)",
    "kills the first process": "os.kill(1, 9)",
    "writes into the system": "open('/usr/written', 'w')",
    "writes into the launcher": "open('/podium/inside/launch.py', 'a')",
    "writes into the root": "open('/written', 'w')",
    "becomes root": "os.setuid(0); os.getuid() == 0 or 1 / 0",
    "reads the launcher's memory": "open(f'/proc/{{os.getppid()}}/mem', 'rb').read(1)",
    "reads the launcher's files": "os.listdir(f'/proc/{{os.getppid()}}/fd')[0]",
    "traces the launcher": "import ctypes; ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) and 1 / 0",
    "makes namespaces": "import ctypes; ctypes.CDLL(None).unshare(0x10000000) and 1 / 0",
    "mounts": "import ctypes; ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, 0) and 1 / 0",
    "makes a device": "os.mknod('/tmp/device', 0o60600, os.makedev(8, 0))",
    "raises its limits": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "takes a shared memory segment": "import ctypes; ctypes.CDLL(None).shmget(0, 4096, 0o1666) < 0 and 1 / 0",
    "reads an open file of the launcher": """
        found = False
        for descriptor in range(3, 256):
            try:
                found = os.read(descriptor, 1) or found
            except OSError:
                pass
        found or 1 / 0
    """,
    "fills the scratch space": """
        for number in range(200):
            open(f'/tmp/{{number}}', 'wb').write(bytes(1 << 20))
    """,
}


def program_of(probe: str, bait: Bait) -> str:
    filled = textwrap.dedent(probe).format(
        folder=str(bait.folder), port=bait.port, pid=bait.pid, parent=str(os.getpid())
    )
    tried = textwrap.indent(filled.strip(), "    ")
    return f"import os, time\ntry:\n{tried}\nexcept BaseException:\n    print('kept in')\nelse:\n    print('escaped')\n"


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PODIUM_BAIT", "a secret of the host")
        yield


@pytest.mark.parametrize("name", REACHING)
def test_outside_the_sandbox_the_probe_escapes(name: str, bait: Bait) -> None:
    command = [sys.executable, "-c", program_of(REACHING[name], bait)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert "escaped" in done.stdout
    (bait.folder / "written").unlink(missing_ok=True)


@pytest.mark.parametrize("name", [*REACHING, *HARMING])
def test_inside_the_sandbox_it_does_not(name: str, bait: Bait) -> None:
    program = program_of((REACHING | HARMING)[name], bait)
    (printed,) = run_with_inputs(program, [""], LIMITS, "bubblewrap")
    assert printed == "kept in\n"
    assert not (bait.folder / "written").exists()


WEAKLY_HELD = [name for name in REACHING if "file" not in name and "folder" not in name and "it through" not in name]
WEAKLY_HELD = [name for name in WEAKLY_HELD if name not in ("reads the list of users", "looks into /proc")]


@pytest.mark.parametrize("name", WEAKLY_HELD)
def test_the_weak_sandbox_holds_processes_network_and_memory(name: str, bait: Bait) -> None:
    (printed,) = run_with_inputs(program_of(REACHING[name], bait), [""], LIMITS, "weak")
    assert printed == "kept in\n"


def test_the_weak_sandbox_does_not_hide_files(bait: Bait) -> None:
    (printed,) = run_with_inputs(program_of(REACHING["reads a file of the host"], bait), [""], LIMITS, "weak")
    assert printed == "escaped\n"


STUBBORN = {
    "loops": "while True: pass",
    "sleeps": "import time; time.sleep(600)",
    "ignores signals": """
        import signal, time
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        while True: time.sleep(1)
    """,
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "a thread that never ends": "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()",
    "a regular expression": "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')",
    "endless output": "while True: print('x' * 10000)",
    "endless output that goes on": """
        import os
        while True:
            try:
                os.write(1, b'x' * 100000)
            except OSError:
                pass
    """,
    "threads without end": """
        import threading, time
        while True:
            try:
                threading.Thread(target=time.sleep, args=(600,)).start()
            except RuntimeError:
                pass
    """,
}


def launchers() -> list[str]:
    """Of this process, and those that lost their parents; other tests may run programs at the same time."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"inside.launch" in path.read_bytes() and not is_of_another_test(int(path.parent.name)):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def is_of_another_test(pid: int) -> bool:
    """Whether the nearest pytest above it is not this one."""
    while pid > 1 and pid != os.getpid():
        if b"pytest" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


@pytest.mark.parametrize("kind", ["bubblewrap", "weak"])
@pytest.mark.parametrize("name", STUBBORN)
def test_a_program_that_does_not_end_is_ended_and_the_next_case_runs(name: str, kind: Sandbox) -> None:
    program = "if input() == 'bad':\n" + textwrap.indent(textwrap.dedent(STUBBORN[name]).strip(), "    ")
    program += "\nelse:\n    print('good')"
    for limit_s in (1.0, 4.0, 16.0):  # on a busy machine a program that prints a word may take longer than a second
        started = time.monotonic()
        limits = Limits(test_timeout_s=limit_s, total_s=60.0, memory_mb=256)
        found = run_with_inputs(program, ["bad", "good"], limits, kind)
        assert time.monotonic() - started < 55
        if found == [None, "good\n"]:
            break
    assert found == [None, "good\n"]
    end = time.monotonic() + 30
    while launchers() and time.monotonic() < end:  # the kernel takes a moment to end the last of them
        time.sleep(0.02)
    assert launchers() == []


def test_the_time_of_all_tests_together_is_limited_and_what_was_done_by_then_counts() -> None:
    program = "import time\nif input() == 'bad':\n    time.sleep(600)\nprint('good')"
    limits = Limits(test_timeout_s=0.5, total_s=1.2, memory_mb=256)
    started = time.monotonic()
    printed = run_with_inputs(program, ["good", *["bad"] * 20, "good"], limits, "bubblewrap")
    assert printed == ["good\n"] + [None] * 21
    assert time.monotonic() - started < 8  # twenty times 0.5 s without the limit


def test_output_is_cut_at_its_limit() -> None:
    limits = Limits(2.0, 5.0, 256, output_bytes=1000)
    program = "print('x' * int(input()))"
    assert run_with_inputs(program, ["999", "1001"], limits, "bubblewrap") == ["x" * 999 + "\n", None]


def test_a_program_may_use_threads_files_and_the_standard_library() -> None:
    program = """
import collections, concurrent.futures, heapq, itertools, json, re, tempfile, threading
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    total = sum(pool.map(int, input().split()))
with tempfile.TemporaryFile("w+") as file:
    file.write(json.dumps(total))
    file.seek(0)
    print(file.read())
"""
    assert run_with_inputs(program, ["1 2 3"], LIMITS, "bubblewrap") == ["6\n"]


def test_a_program_that_depends_on_the_order_of_a_set_prints_the_same_every_time() -> None:
    program = "print({'apple', 'pear', 'plum', 'fig', 'date', 'kiwi'})"
    first, *others = [run_with_inputs(program, [""], LIMITS, "bubblewrap") for _ in range(4)]
    assert others == [first] * 3


def test_a_sandbox_that_breaks_is_not_the_programs_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error abstains; a score of 0 would blame the program."""
    monkeypatch.setattr(sandbox_run, "_bubblewrap", lambda: ("bwrap", "--no-such-option"))
    with pytest.raises(SandboxError, match=r"did not start: .*no-such-option"):
        judge_asserts("x = 1", ["assert x == 1"], LIMITS, "bubblewrap")


def test_a_missing_sandbox_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    sandbox_run._problem.cache_clear()
    try:
        with pytest.raises(InputError, match=r"bwrap is not installed.*apt-get install bubblewrap.*sandbox = \"weak\""):
            refuse_sandbox("bubblewrap")
        refuse_sandbox("weak")
    finally:
        sandbox_run._problem.cache_clear()


def test_sandboxes_run_beside_each_other() -> None:
    results: list[list[str | None]] = []
    run = lambda: results.append(run_with_inputs("print(input())", ["a", "b"], LIMITS, "bubblewrap"))  # noqa: E731
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [["a\n", "b\n"]] * 4


def test_the_filter_knows_the_machines_that_it_names() -> None:
    """8 bytes an instruction; on another machine there is none."""
    for machine in ("x86_64", "aarch64"):
        instructions = call_filter(machine, 1)
        assert instructions is not None
        assert len(instructions) % 8 == 0
    assert call_filter("vax", 1) is None


@pytest.mark.parametrize("left_s", [0.005, 0.015, 0.025, 0.035, 0.045])
def test_a_restart_with_hardly_any_time_left_fails_the_other_tests_or_passes_them(left_s: float) -> None:
    """The second test is stuck for its whole second; then there may be time for another sandbox, or not quite."""
    program = "def f(x):\n    while x: pass\n    return 0"
    limits = Limits(test_timeout_s=1.0, total_s=1.0 + left_s, memory_mb=256)
    made = judge_asserts(program, ["assert f(0) == 0", "assert f(1) == 0", "assert f(0) == 0"], limits, "weak")
    assert made in ([True, False, True], [True, False, False], [False, False, False])
