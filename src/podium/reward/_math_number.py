r"""Numbers as they are written, exactly: decimals, repeating decimals, mixed numbers, other bases."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NoReturn

MAX_EXPONENT_DIGITS = 4
BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
NUMBER = re.compile(
    r"(?P<mixed>[0-9]+ +[0-9]+ ?/ ?[0-9]+(?![0-9.]))"
    r"|(?P<base>[0-9][0-9A-Za-z]*)\s*_\s*(?:\{\s*⟪?\s*(?P<braced>[0-9]{1,2}|[a-z]+)\s*⟫?\s*\}|(?P<bare>[0-9]{1,2}))"
    r"|(?P<whole>[0-9]*)\.(?P<lead>[0-9]*)(?:\\(?:overline|bar)\s*\{\s*(?P<over>[0-9]+)\s*\}"
    r"|(?P<dots>(?:\\dot\s*\{?[0-9]\}?[0-9]*)+)|\((?P<round>[0-9]+)\)(?=\s*$))"
    r"|(?P<long>[0-9]*\.[0-9]+)\s*\.\.\."
    r"|(?P<plain>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE](?P<exponent>[+-]?[0-9]+)(?![0-9A-Za-z.]))?"
)


class Unreadable(ValueError):
    """The text is no expression."""


@dataclass(frozen=True)
class Node:
    """A part of an expression: what it does, and with what."""

    kind: str
    parts: tuple[Any, ...]


def number(value: Fraction | int, decimals: int | None = None) -> Node:
    """A number; `decimals` are the places of a decimal that is written out."""
    return Node("number", (Fraction(value), decimals))


def fail(text: str) -> NoReturn:
    raise Unreadable(text[:40])


def read_number(match: re.Match[str]) -> Node:
    """The number that the pattern found."""
    if match["mixed"]:
        whole, top, bottom = map(int, re.findall("[0-9]+", match["mixed"]))
        return number(whole + Fraction(top, bottom)) if 0 < top < bottom else fail(match[0])
    if match["base"]:
        base = BASES.get(match["braced"] or "") or int(re.sub("[a-z]", "", match["braced"] or match["bare"]) or 0)
        try:
            return number(int(match["base"], base)) if 2 <= base <= 36 else fail(match[0])
        except ValueError as error:
            raise Unreadable(match[0]) from error
    if match["lead"] is not None:
        lead, period = match["lead"], match["over"] or match["round"]
        if match["dots"]:
            lead, period = lead, re.sub("[^0-9]", "", match["dots"])
        return number(_repeating(match["whole"], lead, period))
    if match["long"]:
        whole, _, digits = match["long"].partition(".")
        if again := re.fullmatch(r"([0-9]*?)([0-9]{1,6}?)\2{1,}", digits):
            return number(_repeating(whole, again[1], again[2]))
        return number(Fraction(f"{whole or 0}.{digits}"), len(digits))
    exponent = match["exponent"] or "0"
    if len(exponent.strip("+-").lstrip("0")) > MAX_EXPONENT_DIGITS:
        fail(match[0])
    plain = match["plain"]
    value = Fraction("0" + plain if plain.startswith(".") else plain) * Fraction(10) ** int(exponent)
    places = max(0, len(plain.partition(".")[2]) - int(exponent))
    return number(value, places)


def _repeating(whole: str, lead: str, period: str) -> Fraction:
    """0.1666… from `0`, `1` and `6`."""
    fixed = Fraction(int((whole or "0") + lead), 10 ** len(lead))
    return fixed + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(lead))
