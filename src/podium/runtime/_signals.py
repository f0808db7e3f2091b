"""SIGINT and SIGTERM ask the run to end at the next safe point; a second one ends it at once."""

import os
import signal
from types import FrameType


class StopSignal:
    """Context manager; `requested` is asked by the loop after each window."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.number: int | None = None

    def requested(self) -> bool:
        return self.number is not None

    def __enter__(self) -> "StopSignal":
        self._previous = {number: signal.signal(number, self._receive) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.number is not None:
            os._exit(128 + number)
        self.number = number
