"""SIGINT and SIGTERM ask the run to end at the next safe point; a second one, or the end of the grace time, ends it at
once. Nothing is lost by that but what was not committed yet."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import ClassVar


class StopSignal:
    """Context manager; `requested` is asked by the loop. `grace_s`: seconds that the run is given to end by itself."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)
    _in_front: ClassVar["StopSignal | None"] = None
    """Of the main thread, which waits for a run in another one."""

    def __init__(self, grace_s: float) -> None:
        self._number: int | None = None
        self._grace_s = grace_s
        self._over = threading.Event()

    @property
    def number(self) -> int | None:
        """The signal that came; None while there was none."""
        in_front = self._in_front or self
        return in_front._number if self._number is None else self._number

    def requested(self) -> bool:
        return self.number is not None

    def __enter__(self) -> "StopSignal":
        """Outside the main thread Python takes no handlers: there those of the main thread count, if it has some."""
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
        if not self._over.wait(self._grace_s):
            os.write(2, b"podium: run.grace_s is over; what was committed stays\n")
            self._leave(number)

    def _leave(self, number: int) -> None:
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\x1b[?25h")  # the live table hides the cursor
        os._exit(128 + number)
