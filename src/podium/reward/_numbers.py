"""Numbers as people write them, compared as text: no size of number can make a comparison slow.

Only the digits 0-9 count. A comma is part of a number where it parts groups of three (1,234). A minus is part of it
where nothing that it could be subtracted from stands before it: 10-5 holds 10 and 5.
"""

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from podium.errors import InputError

MINUS = "-−"
NUMBER = re.compile(
    rf"(?:(?<![\w)])[{MINUS}+])?(?:\\?\$|[€£¥])?"  # a sign, a currency
    r"((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


def numbers_in(text: str) -> Iterator[str]:
    """Every number of the text in its normal form: one spelling for each value."""
    for match in NUMBER.finditer(text):
        whole, _, fraction = match[1].replace(",", "").partition(".")
        value = whole.lstrip("0") or "0"
        if fraction.strip("0"):
            value += "." + fraction.rstrip("0")
        yield "-" + value if match[0][0] in MINUS and value != "0" else value


def last_number(text: str) -> str | None:
    """The last number of the text in its normal form; None if it has none."""
    last = None
    for number in numbers_in(text):
        last = number
    return last


def answer_as_text(answer: Any) -> str:
    """The text of an answer that is a text or a number; anything else is an `InputError`."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        return f"{Decimal(str(answer)):f}"  # 1e20 has no exponent here
    raise InputError(f"the answer must be a text or a number, not {answer!r:.60}")


def expected_integer(answer: Any) -> str:
    """The only number of an answer, an integer, in its normal form; anything else is an `InputError`."""
    found = list(numbers_in(answer_as_text(answer)))
    if len(found) != 1 or "." in found[0]:
        raise InputError(f"the answer must hold one integer, not {answer!r:.60}")
    return found[0]
