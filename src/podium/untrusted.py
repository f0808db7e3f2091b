"""What others wrote, made safe to print and to open.

Text (a model's answer, a reward's error, a server's reply) may contain characters that move the cursor, change the
title or paste into the shell. So everything that Podium prints passes through here. A path may lead to a FIFO without a
writer or to a device, which would keep a reader waiting for ever. So files that others may have put where Podium reads
are opened only if they are regular ones.
"""

import errno
import os
import re
import stat
import sys
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters (but not tab and newline), marks that change the text direction, and lone surrogates."""


def printable(text: str) -> str:
    """Replaces control characters by their Python escapes, such as \\x1b."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(text: str, *, end: str = "\n") -> None:
    print(printable(text), end=end, flush=True)


def warn(text: str, *, end: str = "\n") -> None:
    """Prints to the standard error, so the standard output stays what a program or the live table needs."""
    print(printable(text), end=end, file=sys.stderr, flush=True)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Cells in columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def open_regular(path: Path, *, follow_links: bool = True) -> BufferedReader:
    """To read, without waiting. OSError where the path is no regular file, or a link that is not to be followed."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    descriptor = os.open(path, flags if follow_links else flags | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return open(descriptor, "rb")


def read_regular(path: Path, *, max_bytes: int | None = None, follow_links: bool = True) -> bytes:
    """The content; OSError beyond `max_bytes`."""
    with open_regular(path, follow_links=follow_links) as file:
        content = file.read() if max_bytes is None else file.read(max_bytes + 1)
    if max_bytes is not None and len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", str(path))
    return content
