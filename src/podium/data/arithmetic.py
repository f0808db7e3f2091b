"""Built-in data: two-digit sums and differences, the task of the embedded model.

In: a split. Out: rows such as "What is 37 + 48?" with the answer "85". A hash of a problem's text decides its split, so
no problem is in both; the embedded model was pretrained without the held-out problems too.
"""

import zlib
from typing import Annotated, Literal

from pydantic import Field

from podium.records import Row

HELD_OUT_ONE_IN = 32

Split = Annotated[Literal["train", "held_out"], Field(description="part of the fixed split")]


def arithmetic(
    operations: str = "+-",
    *,
    split: Split = "train",
) -> list[Row]:
    """Every problem of the split, in a fixed order."""
    problems = [(a, op, b) for a in range(10, 100) for op in sorted(set(operations)) for b in range(10, 100)]
    return [
        Row.from_text(f"What is {a} {op} {b}?", answer=str(a + b if op == "+" else a - b))
        for a, op, b in problems
        if is_held_out(a, op, b) == (split == "held_out")
    ]


def is_held_out(a: int, op: str, b: int) -> bool:
    """Whether the problem belongs to the held-out split."""
    return zlib.crc32(f"{a} {op} {b}".encode()) % HELD_OUT_ONE_IN == 0
