"""Promises that only the Linux kernel can keep: to die with one's parent, and to be given orphans."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """The process is killed as soon as the thread that started it ends, however that ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the promise was made
        os._exit(1)


def outlive_parent() -> None:
    """Takes that back."""
    _prctl(PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """From now on what descendants leave behind becomes this process's child instead of init's."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
