"""Restricts a process before it runs a tested program. The process cannot undo any of it.

- rlimits bound memory, CPU time and file sizes.
- All capabilities of root are dropped except those for reading and writing files.
- A seccomp filter allows only the system calls in `LISTED`, because the next kernel would add to a list of refused
  calls. The program cannot start processes, open network connections, reach other processes or allocate memory that
  the limits do not count.
- Before each new thread the filter asks the process outside the sandbox, which counts them (`ask_before_threads`).
"""

from __future__ import annotations

import ctypes
import os
import resource

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
"""Libraries try calls from this number on, and use an older call if the kernel does not know the new one."""

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE_THREAD = 0x00010000
THREAD_FLAGS = 0x017D0FFF
"""The flags that libc sets to start a thread. None of them creates a namespace."""
AF_UNIX = 1
F_SETFL, O_ASYNC = 4, 0x2000
COMMANDS = (0, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1030, 1032, 1034)
"""Commands of fcntl: copies and flags of descriptors, locks, sizes of pipes. None names a process that gets signals."""
REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Requests of ioctl: is it a terminal, its size, bytes to read, whether to wait, whether children inherit it."""
KEPT_RIGHTS = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: root may read files of any owner, for example Python's own."""
CAPABILITIES_V3 = 0x20080522
LISTED = """
    read 0 63, write 1 64, open 2 -, openat 257 56, openat2 437 437, creat 85 -, close 3 57, close_range 436
    436, lseek 8 62, pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66, preadv 295 69, pwritev 296 70,
    preadv2 327 286, pwritev2 328 287, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, access
    21 -, faccessat 269 48, faccessat2 439 439, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59,
    flock 73 32, fsync 74 82, fdatasync 75 83, truncate 76 45, ftruncate 77 46, fallocate 285 47, fadvise64 221
    223, getdents 78 -, getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -, renameat 264
    38, renameat2 316 276, mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35, link 86 -,
    linkat 265 37, symlink 88 -, symlinkat 266 36, readlink 89 -, readlinkat 267 78, chmod 90 -, fchmod 91 52,
    fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, umask 95 166,
    utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, statfs 137 43, fstatfs 138 44, getxattr 191 8,
    lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12, flistxattr 196 13, sendfile 40 71,
    copy_file_range 326 285,
    select 23 -, pselect6 270 72, poll 7 -, ppoll 271 73, epoll_create 213 -, epoll_create1 291 20, epoll_ctl
    233 21, epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441, eventfd 284 -, eventfd2 290 19,
    timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87,
    brk 12 214, mmap 9 222, munmap 11 215, mremap 25 216, mprotect 10 226, msync 26 227, mincore 27 232, madvise
    28 233,
    time 201 -, gettimeofday 96 169, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115,
    nanosleep 35 101, times 100 153, alarm 37 -, getitimer 36 102, setitimer 38 103, pause 34 -,
    futex 202 98, futex_waitv 449 449, futex_wake 454 454, futex_wait 455 455, futex_requeue 456 456,
    set_robust_list 273 99, set_tid_address 218 96, rseq 334 293, sched_yield 24 124, getcpu 309 168, arch_prctl
    158 -, exit 60 93, exit_group 231 94, restart_syscall 219 128,
    rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128
    137, rt_sigsuspend 130 133, sigaltstack 131 132,
    getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108
    177, getresuid 118 148, getresgid 120 150, getgroups 115 158, getpgrp 111 -, getpgid 121 155, getsid 124
    156, capget 125 90, getpriority 140 141, getrlimit 97 163, setrlimit 160 164, getrusage 98 165,
    sched_getaffinity 204 123, sched_getscheduler 145 120, sched_getparam 143 121, sched_get_priority_max 146
    125, sched_get_priority_min 147 126, sched_rr_get_interval 148 127, uname 63 160, sysinfo 99 179, getrandom
    318 278, wait4 61 260, waitid 247 95,
    recvfrom 45 207, getsockname 51 204, getpeername 52 205, getsockopt 55 209, shutdown 48 210,
    clone 56 220, kill 62 129, tgkill 234 131, prlimit64 302 261, sched_setaffinity 203 122, fcntl 72 25, ioctl 16 29,
    prctl 157 167, socketpair 53 199, sendto 44 206
"""
"""System calls that a tested program may make, with their numbers on x86_64 and aarch64 (`-`: does not exist): files,
waiting, memory, time, threads, signals, the process itself, the ends of a pair of sockets, and in the last two lines
those that are allowed for some arguments only (see `conditions`)."""


def _numbers(column: int) -> dict[str, int]:
    calls = [call.split() for call in LISTED.replace("\n", " ").split(",")]
    return {call[0]: int(call[column]) for call in calls if call[column] != "-"}


NUMBERS = {"x86_64": _numbers(1), "aarch64": _numbers(2)}
CLONE3 = 435
SECCOMP = {"x86_64": 317, "aarch64": 277}


def give_up_rights(memory_mb: int, cpu_s: float, file_bytes: int, has_threads: bool) -> None:
    """Called by the process that runs a tested program, as its last step before."""
    limits = {
        resource.RLIMIT_AS: memory_mb << 20,
        resource.RLIMIT_CPU: int(cpu_s) + 1,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_SIGPENDING: 64,
        resource.RLIMIT_CORE: 0,
    }
    program = call_filter(os.uname().machine, os.getpid(), has_threads)
    if program is None:  # no filter for this machine: the kernel's limit of processes replaces it
        limits[resource.RLIMIT_NPROC] = 64
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        least = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (least, least))
    _drop_capabilities()
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    if program is not None:
        _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(_Program.of(program)))


def hide_from_others() -> None:
    """No other process of the same user may read this process's memory or open files."""
    _prctl(PR_SET_DUMPABLE, 0)


def ask_before_threads() -> int | None:
    """A descriptor on which the kernel asks for every new thread of this process and its children from now on.

    None if the kernel cannot ask (before Linux 5.5) or another program listens already. Then no program gets threads.
    """
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        return None
    steps = [_step(LOAD, ARCHITECTURE), _step(EQUAL, ARCHITECTURES[machine], 1, 0), _step(RETURN, ALLOW)]
    steps += [_step(LOAD, NUMBER), _step(EQUAL, CLONE3, 0, 1), _step(RETURN, NO_SUCH_CALL)]
    steps += [_step(EQUAL, NUMBERS[machine]["clone"], 1, 0), _step(RETURN, ALLOW)]
    steps += [_step(LOAD, FIRST), _step(ANY_BIT, CLONE_THREAD, 1, 0), _step(RETURN, ALLOW), _step(RETURN, ASK)]
    program = _Program.of(b"".join(steps))
    call = (SECCOMP[machine], SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    try:
        return _call("syscall", *map(ctypes.c_long, call), ctypes.byref(program))
    except OSError:
        return None


class _Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    @classmethod
    def of(cls, instructions: bytes) -> _Program:
        return cls(len(instructions) // 8, instructions)


def call_filter(machine: str, own_pid: int, has_threads: bool = True) -> bytes | None:
    """The seccomp filter as instructions of struct sock_filter; it refuses every call that is not allowed."""
    if machine not in ARCHITECTURES:
        return None
    steps = [_step(LOAD, ARCHITECTURE), _step(EQUAL, ARCHITECTURES[machine], 1, 0), _step(RETURN, REFUSE)]
    steps += [_step(LOAD, NUMBER), _step(AT_LEAST, X32_CALLS, 0, 1), _step(RETURN, REFUSE)]
    limited = conditions(own_pid, has_threads)
    for name, number in NUMBERS[machine].items():
        steps += _allow_if(number, limited.get(name, [[]]))
    return b"".join([*steps, _step(AT_LEAST, NEW_CALLS, 0, 1), _step(RETURN, NO_SUCH_CALL), _step(RETURN, REFUSE)])


def conditions(own_pid: int, has_threads: bool) -> dict[str, list[list[Any]]]:
    """Call → cases. A case is a list of tests: offset, comparison, value, wanted result. The call is allowed if all
    tests of one case hold; a call without cases is refused."""
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
    """One instruction; jumps count from the next instruction."""
    return code.to_bytes(2, "little") + bytes((if_true, if_false)) + value.to_bytes(4, "little")


def _drop_capabilities() -> None:
    """Drops root's rights to raise limits, create devices and read any process. Access to files stays."""
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, of rights 0 to 31 and then of the others
    kept = (KEPT_RIGHTS, KEPT_RIGHTS, 0, 0, 0, 0)
    _call("capget", header, sets)
    _call("capset", header, (ctypes.c_uint32 * 6)(*(has & keep for has, keep in zip(sets, kept))))  # noqa: B905


def _prctl(option: int, *arguments: object) -> None:
    _call("prctl", option, *arguments, *[0] * (4 - len(arguments)))


def _call(name: str, *arguments: object) -> int:
    """Calls a function of libc."""
    result = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
