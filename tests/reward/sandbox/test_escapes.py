"""Programs that try to harm the host, the judge or each other by calls of the kernel, in both sandboxes.

Each probe says "kept in" if it could not; none does harm if it can. `CALLS` are made with arguments that the kernel
would refuse for another reason than a lack of rights, so an answer other than EPERM or ENOSYS shows that the call went
through.
"""

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podium.reward.sandbox import MAX_THREADS, Limits, Sandbox, _problem, judge_asserts, run_with_inputs
from podium.reward.sandbox.inside.limits import NUMBERS, call_filter, conditions
from tests.reward.sandbox.test_run import launchers

pytestmark = pytest.mark.skipif(_problem("bubblewrap") is not None, reason=f"no sandbox: {_problem('bubblewrap')}")
LIMITS = Limits(test_timeout_s=20.0, total_s=60.0, memory_mb=256)
KINDS: tuple[Sandbox, ...] = ("bubblewrap", "weak")

PRELUDE = """
import ctypes, errno, fcntl, os, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
MACHINE = ("x86_64", "aarch64").index(os.uname().machine)

def call(numbers, *arguments):
    if numbers[MACHINE] is None:
        raise OSError(errno.ENOSYS, "not on this machine")
    ctypes.set_errno(0)
    if libc.syscall(ctypes.c_long(numbers[MACHINE]), *map(ctypes.c_long, arguments)) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
"""

CALLS: dict[str, tuple[tuple[int | None, int | None], tuple[int, ...]]] = {
    # other programs and processes
    "fork": ((57, None), ()),
    "vfork": ((58, None), ()),
    "execve": ((59, 221), (0, 0, 0)),
    "execveat": ((322, 281), (-1, 0, 0, 0, 0)),
    "setpgid": ((109, 154), (0, -1)),
    "setsid": ((112, 157), ()),
    "ptrace": ((101, 117), (16, 1, 0, 0)),
    "process_vm_readv": ((310, 270), (1, 0, 0, 0, 0, 1)),
    "process_vm_writev": ((311, 271), (1, 0, 0, 0, 0, 1)),
    "process_madvise": ((440, 440), (-1, 0, 0, 0, 0)),
    "process_mrelease": ((448, 448), (-1, 0)),
    "kcmp": ((312, 272), (1, 1, 99, 0, 0)),
    "tkill": ((200, 130), (-1, 0)),
    "rt_sigqueueinfo": ((129, 138), (-1, 0, 0)),
    "rt_tgsigqueueinfo": ((297, 240), (-1, -1, 0, 0)),
    "pidfd_open": ((434, 434), (-1, 0)),
    "pidfd_send_signal": ((424, 424), (-1, 0, 0, 0)),
    "pidfd_getfd": ((438, 438), (-1, 0, 0)),
    "get_robust_list": ((274, 100), (1, 0, 0)),
    "setpriority": ((141, 140), (99, 0, 0)),
    "sched_setscheduler": ((144, 119), (0, 99, 0)),
    "sched_setparam": ((142, 118), (0, 0)),
    "sched_setattr": ((314, 274), (0, 0, 0)),
    "ioprio_set": ((251, 30), (99, 0, 0)),
    "migrate_pages": ((256, 238), (0, 0, 0, 0)),
    "move_pages": ((279, 239), (0, 0, 0, 0, 0, 99)),
    "timer_create": ((222, 107), (99, 0, 0)),
    # the network, and descriptors on their way
    "socket": ((41, 198), (99, 0, 0)),
    "connect": ((42, 203), (-1, 0, 0)),
    "bind": ((49, 200), (-1, 0, 0)),
    "listen": ((50, 201), (-1, 0)),
    "accept4": ((288, 242), (-1, 0, 0, 0)),
    "sendmsg": ((46, 211), (-1, 0, 0)),
    "sendmmsg": ((307, 269), (-1, 0, 0, 0)),
    "setsockopt": ((54, 208), (-1, 0, 0, 0, 0)),
    # memory and tables of the kernel that no limit counts
    "memfd_create": ((319, 279), (0, 0)),
    "memfd_secret": ((447, 447), (99,)),
    "shmget": ((29, 194), (0, 0, 0)),
    "shmat": ((30, 196), (-1, 0, 0)),
    "msgget": ((68, 186), (1, 0)),
    "semget": ((64, 190), (1, -1, 0)),
    "mq_open": ((240, 180), (0, 0, 0, 0)),
    "inotify_init1": ((294, 26), (99,)),
    "inotify_add_watch": ((254, 27), (-1, 0, 0)),
    "fanotify_init": ((300, 262), (-1, 0)),
    "signalfd4": ((289, 74), (-1, 0, 0, 0)),
    "splice": ((275, 76), (-1, 0, -1, 0, 1, 0)),
    "tee": ((276, 77), (-1, -1, 1, 0)),
    "vmsplice": ((278, 75), (-1, 0, 1, 0)),
    "mlock": ((149, 228), (0, -1)),
    "mlock2": ((325, 284), (0, 0, 99)),
    "mlockall": ((151, 230), (99,)),
    "mbind": ((237, 235), (0, 0, 99, 0, 0, 0)),
    "set_mempolicy": ((238, 237), (99, 0, 0)),
    "add_key": ((248, 217), (0, 0, 0, 0, 0)),
    "request_key": ((249, 218), (0, 0, 0, 0)),
    "keyctl": ((250, 219), (9999, 0, 0, 0, 0)),
    "io_uring_setup": ((425, 425), (0, 0)),
    "io_uring_enter": ((426, 426), (-1, 0, 0, 0, 0, 0)),
    "io_uring_register": ((427, 427), (-1, 0, 0, 0)),
    "userfaultfd": ((323, 282), (99,)),
    "perf_event_open": ((298, 241), (0, 0, 0, 0, 0)),
    "bpf": ((321, 280), (999, 0, 0)),
    "seccomp": ((317, 277), (99, 0, 0)),
    # root's own, in the weak sandbox of a container
    "reboot": ((169, 142), (0, 0, 0, 0)),
    "swapon": ((167, 224), (0, 0)),
    "kexec_load": ((246, 104), (0, 999, 0, 0)),
    "init_module": ((175, 105), (0, 0, 0)),
    "finit_module": ((313, 273), (-1, 0, 0)),
    "delete_module": ((176, 106), (0, 0)),
    "clock_settime": ((227, 112), (99, 0)),
    "clock_adjtime": ((305, 266), (99, 0)),
    "sethostname": ((170, 161), (0, -1)),
    "setdomainname": ((171, 162), (0, -1)),
    "syslog": ((103, 116), (99, 0, 0)),
    "acct": ((163, 89), (1,)),
    "quotactl": ((179, 60), (-1, 0, 0, 0)),
    "iopl": ((172, None), (99,)),
    "ioperm": ((173, None), (-1, 1, 1)),
    "modify_ldt": ((154, None), (1, 0, 0)),
    "mknod": ((133, None), (0, 0, 0)),
    "mknodat": ((259, 33), (-1, 0, 0, 0)),
    "setuid": ((105, 146), (-1,)),
    "setgid": ((106, 144), (-1,)),
    "setresuid": ((117, 147), (-1, -1, -1)),
    "setgroups": ((116, 159), (1, 0)),
    "capset": ((126, 91), (0, 0)),
    "personality": ((135, 92), (-1,)),
    # file systems
    "mount": ((165, 40), (0, 0, 0, 0, 0)),
    "umount2": ((166, 39), (0, 0)),
    "pivot_root": ((155, 41), (0, 0)),
    "chroot": ((161, 51), (0,)),
    "unshare": ((272, 97), (1,)),
    "setns": ((308, 268), (-1, 0)),
    "open_tree": ((428, 428), (-1, 0, 0)),
    "move_mount": ((429, 429), (-1, 0, -1, 0, 0)),
    "fsopen": ((430, 430), (0, 99)),
    "fsmount": ((432, 432), (-1, 99, 0)),
    "fspick": ((433, 433), (-1, 0, 99)),
    "mount_setattr": ((442, 442), (-1, 0, 0, 0, 0)),
    "name_to_handle_at": ((303, 264), (-1, 0, 0, 0, 0)),
    "open_by_handle_at": ((304, 265), (-1, 0, 0)),
    "sync": ((162, 81), ()),
    "syncfs": ((306, 267), (-1,)),
    "a call of a kernel to come": ((9999, 9999), ()),
}

PROBES = {
    "sends a signal through a pipe's owner": """
        reader, writer = os.pipe()
        fcntl.fcntl(reader, fcntl.F_SETOWN, {pid} if {is_weak} else os.getppid())
    """,
    "names an owner of signals by its kind": """
        reader, writer = os.pipe()
        fcntl.fcntl(reader, 15, struct.pack("ii", 1, {pid} if {is_weak} else os.getppid()))
    """,
    "chooses the signal of a descriptor": "fcntl.fcntl(os.pipe()[0], 10, signal.SIGKILL)",
    "asks for signals by fcntl": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETFL, os.O_ASYNC)",
    "asks for signals by ioctl": "fcntl.ioctl(socket.socketpair()[0], 0x5452, struct.pack('i', 1))",
    "names an owner by FIOSETOWN": "fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', os.getppid()))",
    "names an owner by SIOCSPGRP": "fcntl.ioctl(socket.socketpair()[0], 0x8902, struct.pack('i', os.getppid()))",
    "asks for signals about a folder": "fcntl.fcntl(os.open('.', 0), 1026, 2)",
    "takes a lease on a file": "fcntl.fcntl(os.open('/proc/self/exe' if {is_weak} else '/dev/null', 0), 1024, 0)",
    "widens a pipe": "fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)",
    "types into a terminal": "fcntl.ioctl(0, 0x5412, b'x')",
    "takes a terminal": "fcntl.ioctl(0, 0x540E, 0)",
    "sends to an address from a pair of sockets": """
        one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            one.sendto(b'x', b'\\0podium-nobody')
        except ConnectionRefusedError:
            pass
    """,
    "hands a descriptor over": "socket.send_fds(socket.socketpair()[0], [b'x'], [0])",
    "makes a pair of other sockets": "socket.socketpair(socket.AF_INET)",
    "kills all": "os.kill(-1, 0)",
    "kills its group": "os.kill(0, 0)",
    "kills the launcher": "os.kill(os.getppid(), 0)",
    "kills the bait": "os.kill({pid}, 0)",
    "kills a thread of the launcher": "call((234, 131), os.getppid(), os.getppid(), 0)",
    "limits the bait": "resource.prlimit({pid}, resource.RLIMIT_CORE)",
    "moves the launcher": "os.sched_setaffinity(os.getppid(), os.sched_getaffinity(0))",
    "takes a real-time priority": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
    "becomes more important": "os.nice(-1)",
    "raises its memory": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "raises its number of files": "resource.setrlimit(resource.RLIMIT_NOFILE, (65536, 65536))",
    "asks to be dumped": "libc.prctl(4, 1, 0, 0, 0) and 1 / 0",
    "lets others trace it": "libc.prctl(0x59616D61, -1, 0, 0, 0) and 1 / 0",
    "adopts orphans": "libc.prctl(36, 1, 0, 0, 0) and 1 / 0",
    "takes a signal at its parent's death": "libc.prctl(1, 9, 0, 0, 0) and 1 / 0",
    "a thread in a namespace of its own": "call((56, 220), 0x00010F00 | 0x00020000, 0, 0, 0, 0)",
    "a process by clone": "call((56, 220), 17, 0, 0, 0, 0)",
    "a process that shares its memory": "call((56, 220), 0x4100 | 17, 0, 0, 0, 0)",
    "a thread by clone3": "call((435, 435), 0, 0)",
    "a call of 32 bits": "MACHINE == 0 and call((0x40000000 | 39, 0)) or MACHINE and 1 / 0",
    "writes into the launcher's memory": "open(f'/proc/{{os.getppid()}}/mem', 'r+b')",
    "opens the channel of verdicts": "open(f'/proc/{{os.getppid()}}/fd/1', 'ab')",
    "writes on a descriptor that it was not given": """
        any(is_open(descriptor) for descriptor in range(3, 64)) or 1 / 0
    """,
    "starts a program by a library": "import subprocess; subprocess.run(['true'])",
    "opens a terminal": "import pty; pty.openpty()" if Path("/dev/ptmx").exists() else "1 / 0",
    "fills memory with descriptors in flight": """
        one, other = socket.socketpair()
        for _ in range(1000):
            socket.send_fds(one, [b'x'], [0] * 100)
    """,
}


@pytest.fixture(scope="module")
def bait() -> Iterator[int]:
    """A process of the same user, which must neither end nor stop."""
    sleeper = subprocess.Popen(["sleep", "600"])
    yield sleeper.pid
    try:
        state = Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state == "S", "a probe reached a process of the host"
        assert os.getpriority(os.PRIO_PROCESS, sleeper.pid) == os.getpriority(os.PRIO_PROCESS, 0)
    finally:
        sleeper.kill()
        sleeper.wait()


def program_of(probe: str, kind: Sandbox, pid: int) -> str:
    filled = textwrap.dedent(probe).format(pid=pid, is_weak=kind == "weak")
    tried = textwrap.indent(filled.strip(), "    ")
    outcome = "except BaseException:\n    print('kept in')\nelse:\n    print('escaped')\n"
    return f"{PRELUDE}try:\n{tried}\n{outcome}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROBES)
def test_no_probe_gets_through(name: str, kind: Sandbox, bait: int) -> None:
    """The case after it runs as ever: neither launcher nor judge was harmed."""
    program = f"if input() == 'good':\n    print('good')\n    raise SystemExit\n{program_of(PROBES[name], kind, bait)}"
    assert run_with_inputs(program, ["bad", "good"], LIMITS, kind) == ["kept in\n", "good\n"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_call_beyond_the_listed_ones_reaches_the_kernel(kind: Sandbox) -> None:
    program = f"""{PRELUDE}
for name, (numbers, arguments) in {CALLS!r}.items():
    try:
        call(numbers, *arguments)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS):
            continue
    print(name)
"""
    assert run_with_inputs(program, [""], LIMITS, kind) == [""]


def test_no_call_is_both_tried_here_and_allowed() -> None:
    assert not set(CALLS) & {*NUMBERS["x86_64"], *NUMBERS["aarch64"]}
    for place, machine in enumerate(("x86_64", "aarch64")):
        assert conditions(1, has_threads=True).keys() < NUMBERS[machine].keys()
        allowed = list(NUMBERS[machine].values())
        assert len(set(allowed)) == len(allowed)
        assert not set(allowed) & {numbers[place] for numbers, _ in CALLS.values()}
        instructions = call_filter(machine, 1)
        assert instructions is not None
        assert len(instructions) // 8 <= 4096


THREADS = f"""{PRELUDE}
import mmap
stacks, made = [], 0
libc.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
for _ in range(3000):  # as a machine program would: neither Python nor libc know of them
    stacks.append(mmap.mmap(-1, 4096))
    top = ctypes.addressof(ctypes.c_char.from_buffer(stacks[-1])) + 4096
    if libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), top, 0x50F00, None) < 0:
        break
    made += 1
print(made, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_threads_are_counted_however_they_are_made(kind: Sandbox) -> None:
    (printed,) = run_with_inputs(THREADS, [""], LIMITS, kind)
    assert printed == f"{MAX_THREADS - 1}\n"


@pytest.mark.parametrize("kind", KINDS)
def test_threads_that_make_threads_stay_within_twice_the_limit(kind: Sandbox) -> None:
    """Each may ask before the others have begun."""
    program = f"""{PRELUDE}
threading.stack_size(1 << 18)
counter = threading.Semaphore(0)
def more():
    counter.release()
    try:
        for _ in range(2):
            threading.Thread(target=more, daemon=True).start()
    except RuntimeError:
        pass
    time.sleep(600)
more_at_once = threading.Thread(target=more, daemon=True)
more_at_once.start()
end = time.monotonic() + 8
while counter._value < {MAX_THREADS - 1} and time.monotonic() < end:
    time.sleep(0.05)
time.sleep(0.5)
print(counter._value, flush=True)
os._exit(0)
"""
    (printed,) = run_with_inputs(program, [""], LIMITS, kind)
    assert printed is not None
    assert MAX_THREADS - 1 <= int(printed) <= 2 * MAX_THREADS


@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_that_ended_makes_room_for_another(kind: Sandbox) -> None:
    program = f"""
import concurrent.futures, threading
for _ in range({2 * MAX_THREADS}):
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
with concurrent.futures.ThreadPoolExecutor(32) as pool:
    print(sum(pool.map(int, "1 2 3".split())))
"""
    assert run_with_inputs(program, [""], LIMITS, kind) == ["6\n"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tested_function_may_use_threads(kind: Sandbox) -> None:
    program = """
from concurrent.futures import ThreadPoolExecutor
def total(numbers):
    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(abs, numbers))
"""
    assert judge_asserts(program, ["assert total([1, -2]) == 3"], LIMITS, kind) == [True]


@pytest.mark.parametrize("kind", KINDS)
def test_signals_through_a_descriptor_do_not_freeze_the_judge(kind: Sandbox) -> None:
    program = """
import fcntl, os, signal
def f():
    try:
        reader, writer = os.pipe()
        fcntl.fcntl(reader, fcntl.F_SETOWN, os.getppid())
        fcntl.fcntl(reader, 10, signal.SIGSTOP)
        fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
        os.write(writer, b"x")
    except OSError:
        pass
    return 1
"""
    assert judge_asserts(program, ["assert f() == 1", "assert f() == 1"], LIMITS, kind) == [True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_where_threads_cannot_be_counted_no_program_has_any(kind: Sandbox, tmp_path: Path) -> None:
    """A listener that is there already, as some containers have one, leaves no second one to be had."""
    code = f"""
from podium.reward.sandbox.inside.limits import ask_before_threads
from podium.reward.sandbox import Limits, refuse_sandbox, run_with_inputs
first = ask_before_threads()
assert first is not None
program = "import threading\\ntry: threading.Thread(target=int).start()\\nexcept RuntimeError: print('none')"
print(run_with_inputs(program, [""], Limits(2.0, 5.0, 256), {kind!r}))
refuse_sandbox({kind!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "['none\\n']\n", done.stderr
    assert "programs cannot start threads on this machine" in done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_of_programs_that_are_cut_off_with_many_threads(kind: Sandbox) -> None:
    program = THREADS.replace("os._exit(0)", "time.sleep(600)")
    limits = Limits(test_timeout_s=0.5, total_s=1.0, memory_mb=256)
    runs = [threading.Thread(target=run_with_inputs, args=(program, ["", ""], limits, kind)) for _ in range(2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    end = time.monotonic() + 20
    while launchers() and time.monotonic() < end:
        time.sleep(0.02)
    assert launchers() == []
