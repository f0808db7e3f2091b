"""Processes that start others: promises that only the Linux kernel can keep (to die with one's parent, to be given
orphans, limits), and the end of a child with all that it left behind."""

import ctypes
import os
import resource
import signal
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MAX_GENERATIONS = 100
"""How far the children of children are followed."""


@dataclass(frozen=True)
class Limits:
    """What the kernel lets one child use."""

    memory_mb: int
    """Address space, on top of what the process takes before it is limited."""
    file_bytes: int
    """Size of a file that it writes."""
    open_files: int
    more_tasks: int
    """Processes and threads that the user may have beyond those there were at the start; the kernel exempts root."""


def die_with_parent(parent: int, by: int = signal.SIGKILL) -> None:
    """The process gets the signal as soon as the thread that started it ends, however that ends."""
    _prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it ended before the promise was made
        os._exit(1)


def outlive_parent() -> None:
    """Takes that back."""
    _prctl(PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """From now on what descendants leave behind becomes this process's child instead of init's."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Processes whose parent this one is."""
    me = os.getpid()
    with open(f"/proc/{me}/task/{me}/children") as file:
        return [int(pid) for pid in file.read().split()]


def bury(worker: int, others: Collection[int]) -> int:
    """Kills a child's process group, and what escaped from it; its exit status, negative for a signal.

    A child that is dead stays a zombie until now, so its number cannot have become another process's. `others` are the
    children that stay.
    """
    with suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)  # it may not lead a group yet
    _, status = os.waitpid(worker, 0)
    kill_strays(others)
    return os.waitstatus_to_exitcode(status)


def kill_strays(others: Collection[int]) -> None:
    """Processes that left their worker's group became this one's children when their parents died."""
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
    """From now on. The kernel ends a busy process even where its driver is too busy to; one that waits is the driver's
    to end."""
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


def how_it_ended(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "its process died"
    if status >= 0:
        return f"its process exited with code {status}"
    names = {each.value: each.name for each in signal.Signals}
    return f"its process was killed by {names.get(-status, f'signal {-status}')}"


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
