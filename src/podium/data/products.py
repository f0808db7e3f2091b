"""Built-in data: products of a three-digit and a two-digit number, the task of the model that has a calculator.

In: a split. Out: rows such as "What is 347 * 86?" with the answer "29842". A hash of a problem's text decides its
split.
"""

import zlib

from podium.data.arithmetic import Split
from podium.records import Row

ONE_IN = 20
"""Every so manieth problem is used: 4,000 are enough."""
HELD_OUT_ONE_IN = 8


def products(*, split: Split = "train") -> list[Row]:
    """Every problem of the split, in a fixed order."""
    problems = [(a, b) for a in range(100, 1000) for b in range(10, 100) if split_of(a, b) == split]
    return [Row.from_text(f"What is {a} * {b}?", answer=str(a * b)) for a, b in problems]


def split_of(a: int, b: int) -> str | None:
    """The split of a problem; None if it is in neither."""
    place, rest = divmod(zlib.crc32(f"{a} * {b}".encode()), ONE_IN)
    if rest:
        return None
    return "held_out" if place % HELD_OUT_ONE_IN == 0 else "train"
