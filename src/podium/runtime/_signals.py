"""SIGINT and SIGTERM ask the run to end at the next safe point; a second one ends it at once."""

import os
import signal
import sys
import threading
from types import FrameType


class StopSignal:
    """Context manager; `requested` is asked by the loop after each window."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.number: int | None = None

    def requested(self) -> bool:
        return self.number is not None

    def __enter__(self) -> "StopSignal":
        """Outside the main thread Python takes no handlers: then signals do what they did before."""
        mine = self.SIGNALS if threading.current_thread() is threading.main_thread() else ()
        self._previous = {number: signal.signal(number, self._receive) for number in mine}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.number is not None:
            sys.stdout.write("\x1b[?25h" if sys.stdout.isatty() else "")  # the live table hides the cursor
            sys.stdout.flush()
            os._exit(128 + number)
        self.number = number
        os.write(2, b"\npodium: stopping at the next safe point, with a commit; a second signal stops at once\n")
