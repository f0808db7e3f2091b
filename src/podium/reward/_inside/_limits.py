"""What is taken from a process before it runs a tested program; none of it can be had back.

Limits on memory, processor time and files by rlimit. By a seccomp filter: no new process and no other program, no
socket, no hand on another process, no memory that the limits do not count.
"""

from __future__ import annotations

import ctypes
import os
import resource

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38
SECCOMP_MODE_FILTER = 2
ALLOW, REFUSE, NO_SUCH_CALL = 0x7FFF0000, 0x00050001, 0x00050026  # the latter two: EPERM and ENOSYS
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of classic BPF
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
CLONE_THREAD = 0x00010000
CLONE3 = 435

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
OWN_PROCESS_ONLY = {"kill": (62, 129), "tgkill": (234, 131)}
ON_ITSELF_ONLY = {
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
"""Calls whose first argument is a process: 0 is the caller."""
REFUSED = {
    # other programs and processes
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "setpgid": (109, 154),
    "setsid": (112, 157),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    # the network
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    # memory that no limit counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # the rest of the kernel that no exercise needs
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
"""Numbers of the calls on x86_64 and aarch64."""


def give_up_rights(memory_mb: int, cpu_s: float, file_bytes: int) -> None:
    """For the process that runs a tested program, as its last step before it does."""
    limits = {
        resource.RLIMIT_AS: memory_mb << 20,
        resource.RLIMIT_CPU: int(cpu_s) + 1,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    program = call_filter(os.uname().machine, os.getpid())
    if program is None:  # no filter for this machine: then the kernel's count of processes has to do
        limits[resource.RLIMIT_NPROC] = 64
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        least = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (least, least))
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    if program is not None:
        instructions = ctypes.create_string_buffer(program)
        _prctl(
            PR_SET_SECCOMP,
            SECCOMP_MODE_FILTER,
            ctypes.byref(_Program(len(program) // 8, ctypes.addressof(instructions))),
        )


def hide_from_others() -> None:
    """No other process of the same user may look into this one's memory or files."""
    _prctl(PR_SET_DUMPABLE, 0)


class _Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def call_filter(machine: str, own_pid: int) -> bytes | None:
    """The seccomp filter as instructions of struct sock_filter; a call that nothing refuses is allowed."""
    if machine not in ARCHITECTURES:
        return None
    column = list(ARCHITECTURES).index(machine)
    steps = [_step(LOAD, ARCHITECTURE), _step(EQUAL, ARCHITECTURES[machine], 1, 0), _step(RETURN, REFUSE)]
    steps += [_step(LOAD, NUMBER), _step(AT_LEAST, 0x40000000, 0, 1), _step(RETURN, REFUSE)]  # the x32 calls
    for numbers in REFUSED.values():
        if numbers[column] is not None:
            steps += [_step(EQUAL, numbers[column], 0, 1), _step(RETURN, REFUSE)]
    steps += [_step(EQUAL, CLONE3, 0, 1), _step(RETURN, NO_SUCH_CALL)]  # libc then takes clone, whose flags show
    allowed_if = [(numbers[column], _step(EQUAL, own_pid, 1, 0)) for numbers in OWN_PROCESS_ONLY.values()]
    allowed_if += [(numbers[column], _step(EQUAL, 0, 1, 0)) for numbers in ON_ITSELF_ONLY.values()]
    for number, test in [*allowed_if, (CLONE[machine], _step(ANY_BIT, CLONE_THREAD, 1, 0))]:
        steps += [_step(EQUAL, number, 0, 4), _step(LOAD, FIRST_ARGUMENT), test]
        steps += [_step(RETURN, REFUSE), _step(RETURN, ALLOW)]
    return b"".join([*steps, _step(RETURN, ALLOW)])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction: jumps are counted from the next one."""
    return code.to_bytes(2, "little") + bytes((if_true, if_false)) + value.to_bytes(4, "little")


def _prctl(option: int, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, *arguments, *[0] * (4 - len(arguments))) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
