"""SIGINT and SIGTERM ask the run to stop at the next safe point. A second signal, or the end of the grace time, ends
the process at once; only what was not committed yet is lost."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import ClassVar

GRACE_S = 30.0
"""Seconds between a signal and the end of the process: what preemptible machines give, as Kubernetes and Slurm do."""


class StopSignal:
    """Context manager; the loop calls `requested`. After `GRACE_S` seconds the process ends in any case."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)
    _in_front: ClassVar["StopSignal | None"] = None
    """The one of the main thread, which waits for a run in another thread."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._over = threading.Event()

    @property
    def number(self) -> int | None:
        """The received signal; None if there was none."""
        in_front = self._in_front or self
        return in_front._number if self._number is None else self._number

    def requested(self) -> bool:
        return self.number is not None

    def __enter__(self) -> "StopSignal":
        """Python allows signal handlers only in the main thread; in other threads the main thread's handlers count."""
        is_main = threading.current_thread() is threading.main_thread()
        self._previous = {number: signal.signal(number, self._receive) for number in self.SIGNALS if is_main}
        StopSignal._in_front = self if is_main else self._in_front
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._in_front is self:
            StopSignal._in_front = None
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self._number is not None:
            self._leave(number)
        self._number = number
        os.write(2, b"\npodium: stopping at the next safe point, with a commit; a second signal stops at once\n")
        threading.Thread(target=self._wait_and_leave, args=(number,), name="grace", daemon=True).start()

    def _wait_and_leave(self, number: int) -> None:
        if not self._over.wait(GRACE_S):
            os.write(2, f"podium: the {GRACE_S:g} s to stop are over; the checkpoints stay\n".encode())
            self._leave(number)

    def _leave(self, number: int) -> None:
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\x1b[?25h")  # the live table hides the cursor
        os._exit(128 + number)
