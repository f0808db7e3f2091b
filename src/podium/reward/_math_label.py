"""The answer that a row expects, for the rewards of mathematics."""

from typing import Any

from podium.errors import InputError
from podium.records import Row
from podium.reward._math_form import normal
from podium.reward._math_text import MAX_CHARACTERS, last_boxed, usable
from podium.reward._numbers import answer_as_text


def expected_answer(answer: Any) -> str:
    """A text or a number; where it has a box, what stands in that."""
    text = answer_as_text(answer)
    boxed = last_boxed(text)
    found = usable(text if boxed is None else boxed)
    if found is None or not normal(found):
        raise InputError(f"the answer must have 1 to {MAX_CHARACTERS} characters, not {answer!r:.60}")
    return found


def check(row: Row) -> None:
    """The row has an answer to compare with."""
    expected_answer(row.answer)
