"""Passes on what child processes print.

Children of a ForkServer that run other people's code do not write to the standard error themselves: it may be a
terminal, which obeys control characters, or a file that is larger than they may write.
"""

import codecs
import os
import threading
from contextlib import suppress

from podium.terminal import printable

FLUSH_S = 2.0
"""For the last prints."""


class Relay:
    """Writes what is written to its `descriptor` to the standard error, as text that a terminal can show."""

    def __init__(self) -> None:
        self._readable, self.descriptor = os.pipe()
        self._thread = threading.Thread(target=self._run, name="prints of rewards", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """When the writers have ended; one that escaped may hold the descriptor open."""
        os.close(self.descriptor)
        self._thread.join(timeout=FLUSH_S)

    def _run(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        with open(self._readable, "rb", buffering=0) as prints:
            while data := prints.read(1 << 16):
                _write(printable(decoder.decode(data)))


def _write(text: str) -> None:
    """A full disk loses prints, and nothing else."""
    data = text.encode("utf-8", "backslashreplace")
    with suppress(OSError):
        while data:
            data = data[os.write(2, data) :]
