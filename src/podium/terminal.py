"""Text for a terminal.

What others wrote (a model's answer, a reward's error, a server's reply) may contain characters that move the cursor,
change the title or paste into the shell. So everything that Podium prints passes through here.
"""

import re
import sys
from collections.abc import Sequence

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
