"""The system calls that a tested program may make, by their numbers on x86_64 and aarch64 (`-`: not there).

What is not listed is refused. A list of what is refused would have to name every way to reach another process, and the
next kernel would add one.
"""

from __future__ import annotations

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
    recvfrom 45 207, getsockname 51 204, getpeername 52 205, getsockopt 55 209, shutdown 48 210
"""
"""Files, waiting, memory, time, threads, signals, the process itself, the ends of a pair of sockets."""


def _numbers(column: int) -> dict[str, int]:
    calls = [call.split() for call in LISTED.replace("\n", " ").split(",")]
    return {call[0]: int(call[column]) for call in calls if call[column] != "-"}


ALLOWED = {"x86_64": _numbers(1), "aarch64": _numbers(2)}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
SECCOMP = {"x86_64": 317, "aarch64": 277}
CONDITIONAL = {
    "clone": (56, 220),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    "prctl": (157, 167),
    "socketpair": (53, 199),
    "sendto": (44, 206),
}
"""Calls that are allowed for some arguments only: `_limits.conditions`."""
