"""What the two search rewards share: the block that holds the answer, and the labels that it is compared with."""

import json
from contextlib import suppress
from typing import Any

from podium.records import Row
from podium.reward._markup import last_block
from podium.reward._squad import expected_texts


def found_answer(text: str) -> str | None:
    """What stands in the last `<finish>…</finish>` or `<answer>…</answer>`; None without one that is filled."""
    block = last_block(text, "finish", "answer")
    return block if block and block.strip() else None


def labels(answer: Any) -> list[str]:
    """One answer or a list of them, which may be written as JSON: `'["Paris", "Paris, France"]'`."""
    if isinstance(answer, str) and answer.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):  # a text may happen to begin with a bracket
            answer = json.loads(answer)
    return expected_texts(answer)


def check(row: Row) -> None:
    """The row has an answer, or several, to compare with."""
    labels(row.answer)
