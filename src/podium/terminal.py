"""Text for a terminal.

What others wrote (a model's answer, a reward's error, a server's reply) may hold characters that move the cursor,
change the title or paste into the shell, so everything that is printed passes here.
"""

import re
import sys

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""All but the tab and the end of a line: control characters, marks that reverse text, halves of a character."""


def printable(text: str) -> str:
    """Control characters as Python writes them in a literal, such as \\x1b."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(text: str, *, end: str = "\n") -> None:
    print(printable(text), end=end, flush=True)


def warn(text: str, *, end: str = "\n") -> None:
    """On the standard error, next to whatever is drawn."""
    print(printable(text), end=end, file=sys.stderr, flush=True)
