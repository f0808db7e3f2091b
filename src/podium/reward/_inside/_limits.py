"""Restricts a process before it runs a tested program. The process cannot undo any of it.

- rlimits bound memory, CPU time and file sizes.
- All capabilities of root are dropped except those for reading and writing files.
- A seccomp filter allows only the system calls listed in `_calls`. The program cannot start processes, open network
  connections, reach other processes or allocate memory that the limits do not count.
- Before each new thread the filter asks the process outside the sandbox, which counts them (`ask_before_threads`).
"""

from __future__ import annotations

import ctypes
import os
import resource

from ._calls import ALLOWED, CLONE, CLONE3, CONDITIONAL, SECCOMP

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PR_SET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 15, 16, 22, 38
SECCOMP_MODE_FILTER, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER = 2, 1, 8
ALLOW, REFUSE, NO_SUCH_CALL, ASK = 0x7FFF0000, 0x00050001, 0x00050026, 0x7FC00000  # the middle two: EPERM and ENOSYS
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of classic BPF
NUMBER, ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
FIRST, SECOND, THIRD, FIFTH = 16, 24, 32, 48  # the low halves of arguments
HIGH = 4
"""From the low half of an argument to its high half."""
X32_CALLS = 0x40000000
NEW_CALLS = 424
"""Libraries try calls from here on, and take an older one where the kernel has none."""

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE_THREAD = 0x00010000
THREAD_FLAGS = 0x017D0FFF
"""All that libc asks for when it starts a thread; no namespace among them."""
AF_UNIX = 1
F_SETFL, O_ASYNC = 4, 0x2000
COMMANDS = (0, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1030, 1032, 1034)
"""Of fcntl: copies and flags of descriptors, locks, sizes of pipes. None that names a process to send signals to."""
REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Of ioctl: whether it is a terminal and its size, bytes to read, whether to wait, whether to inherit."""
KEPT_RIGHTS = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: root may read files of any owner, for example Python's own."""
CAPABILITIES_V3 = 0x20080522


def give_up_rights(memory_mb: int, cpu_s: float, file_bytes: int, has_threads: bool) -> None:
    """For the process that runs a tested program, as its last step before it does."""
    limits = {
        resource.RLIMIT_AS: memory_mb << 20,
        resource.RLIMIT_CPU: int(cpu_s) + 1,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_SIGPENDING: 64,
        resource.RLIMIT_CORE: 0,
    }
    program = call_filter(os.uname().machine, os.getpid(), has_threads)
    if program is None:  # no filter for this machine: then the kernel's count of processes has to do
        limits[resource.RLIMIT_NPROC] = 64
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        least = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (least, least))
    _drop_capabilities()
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    if program is not None:
        instructions = ctypes.create_string_buffer(program)
        _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(_Program.of(instructions)))


def hide_from_others() -> None:
    """No other process of the same user may look into this one's memory or files."""
    _prctl(PR_SET_DUMPABLE, 0)


def ask_before_threads() -> int | None:
    """A descriptor on which every new thread of this process and its children is asked for from now on.

    None where the kernel has no such thing (before Linux 5.5) or another program has it already: then no program has
    threads.
    """
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        return None
    steps = [_step(LOAD, ARCHITECTURE), _step(EQUAL, ARCHITECTURES[machine], 1, 0), _step(RETURN, ALLOW)]
    steps += [_step(LOAD, NUMBER), _step(EQUAL, CLONE3, 0, 1), _step(RETURN, NO_SUCH_CALL)]
    steps += [_step(EQUAL, CLONE[machine], 1, 0), _step(RETURN, ALLOW)]
    steps += [_step(LOAD, FIRST), _step(ANY_BIT, CLONE_THREAD, 1, 0), _step(RETURN, ALLOW), _step(RETURN, ASK)]
    instructions = ctypes.create_string_buffer(b"".join(steps))
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    libc = ctypes.CDLL(None, use_errno=True)
    made = libc.syscall(
        ctypes.c_long(SECCOMP[machine]),
        ctypes.c_ulong(SECCOMP_SET_MODE_FILTER),
        ctypes.c_ulong(SECCOMP_FILTER_FLAG_NEW_LISTENER),
        ctypes.byref(_Program.of(instructions)),
    )
    return None if made < 0 else made


class _Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))

    @classmethod
    def of(cls, instructions: Any) -> _Program:
        """The buffer must outlive it; `create_string_buffer` adds a byte."""
        return cls((len(instructions) - 1) // 8, ctypes.addressof(instructions))


def call_filter(machine: str, own_pid: int, has_threads: bool = True) -> bytes | None:
    """The seccomp filter as instructions of struct sock_filter; a call that nothing allows is refused."""
    if machine not in ARCHITECTURES:
        return None
    column = list(ARCHITECTURES).index(machine)
    steps = [_step(LOAD, ARCHITECTURE), _step(EQUAL, ARCHITECTURES[machine], 1, 0), _step(RETURN, REFUSE)]
    steps += [_step(LOAD, NUMBER), _step(AT_LEAST, X32_CALLS, 0, 1), _step(RETURN, REFUSE)]
    for number in ALLOWED[machine].values():
        steps += [_step(EQUAL, number, 0, 1), _step(RETURN, ALLOW)]
    for name, cases in conditions(own_pid, has_threads).items():
        steps += _allow_if(CONDITIONAL[name][column], cases)
    return b"".join([*steps, _step(AT_LEAST, NEW_CALLS, 0, 1), _step(RETURN, NO_SUCH_CALL), _step(RETURN, REFUSE)])


def conditions(own_pid: int, has_threads: bool) -> dict[str, list[list[Any]]]:
    """Call → cases, each a list of tests: where the word is, comparison, value, what it must say. The call is allowed
    where all tests of one case hold."""
    itself = [[(FIRST, EQUAL, 0, True)]]
    thread = [(FIRST, ANY_BIT, CLONE_THREAD, True), (FIRST, ANY_BIT, 0xFFFFFFFF & ~THREAD_FLAGS, False)]
    return {
        "clone": [thread] if has_threads else [],
        "kill": [[(FIRST, EQUAL, own_pid, True)]],
        "tgkill": [[(FIRST, EQUAL, own_pid, True)]],
        "prlimit64": itself,
        "sched_setaffinity": itself,
        "fcntl": [
            [(SECOND, EQUAL, F_SETFL, True), (THIRD, ANY_BIT, O_ASYNC, False)],
            *([(SECOND, EQUAL, command, True)] for command in COMMANDS),
        ],
        "ioctl": [[(SECOND, EQUAL, request, True)] for request in REQUESTS],
        "prctl": [[(FIRST, EQUAL, option, True)] for option in (PR_SET_NAME, PR_GET_NAME)],
        "socketpair": [[(FIRST, EQUAL, AF_UNIX, True)]],  # an event loop wakes itself by one
        "sendto": [[(FIFTH, EQUAL, 0, True), (FIFTH + HIGH, EQUAL, 0, True)]],  # to the other end, no address
    }


def _allow_if(number: int, cases: list[list[Any]]) -> list[bytes]:
    body: list[bytes] = []
    for case in cases:
        for place, (offset, comparison, value, wanted) in enumerate(case):
            to_next_case = 2 * (len(case) - 1 - place) + 1
            jumps = (0, to_next_case) if wanted else (to_next_case, 0)
            body += [_step(LOAD, offset), _step(comparison, value, *jumps)]
        body.append(_step(RETURN, ALLOW))
    return [_step(EQUAL, number, 0, len(body) + 1), *body, _step(RETURN, REFUSE)]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction: jumps are counted from the next one."""
    return code.to_bytes(2, "little") + bytes((if_true, if_false)) + value.to_bytes(4, "little")


def _drop_capabilities() -> None:
    """Root's rights: to raise limits, to make devices, to look into any process. Files stay as they are."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, of rights 0 to 31 and then of the others
    kept = (KEPT_RIGHTS, KEPT_RIGHTS, 0, 0, 0, 0)
    if libc.capget(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    rights = (ctypes.c_uint32 * 6)(*(has & keep for has, keep in zip(sets, kept)))  # noqa: B905
    if libc.capset(header, rights) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _prctl(option: int, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, *arguments, *[0] * (4 - len(arguments))) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
