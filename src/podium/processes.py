"""Processes that start others: promises that only the Linux kernel can keep (to die with one's parent, to be given
orphans), and the end of a child with all that it left behind."""

import ctypes
import os
import signal
from collections.abc import Collection
from contextlib import suppress

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MAX_GENERATIONS = 100
"""How far the children of children are followed."""


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
