"""1 if the last number of the text is the answer's, else 0; commas and units do not count.

The answer is a number (`18`, `"1,200"`, `"$18"`, `"7/8"`) or GSM8K's own text, whose answer stands after `####`.
`18.00` equals `18`; see `_numbers.py` for what is a number. A text's `12 million` is 12,000,000, and 12 as well: some
questions ask how many millions. An answer of several numbers (`12:30`, `10^6`) or with a
word such as `million` is refused when the rows are loaded, because no single number in it is meant.
"""

import re
from typing import Any

from podium.errors import InputError
from podium.records import Prompt, Rollout, Row
from podium.reward._contract import checks_answer, declare_range
from podium.reward._numbers import answer_as_text, last_readings, numbers_in
from podium.reward._thinking import judges_answer

MARKER = "####"
SCALE = re.compile(r"[0-9]\s*(?:hundred|thousand|million|billion|trillion|dozen)\b", re.IGNORECASE)
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")


def expected_number(answer: Any) -> str:
    """The number after the last `####`; without that marker the last number of the answer."""
    _, marker, tail = answer_as_text(answer).rpartition(MARKER)
    found = list(numbers_in(tail))
    if not found:
        raise InputError(f"no number in the answer {answer!r:.60}; give one, or a text that ends in '#### 18'")
    if SCALE.search(tail) or (len(found) > 1 and not WORD.search(tail)):
        raise InputError(
            f"the answer {answer!r:.60} is not a single number in digits; give one such as 18, 7/8 or 1,200"
        )
    return found[0] if marker else found[-1]


def check(row: Row) -> None:
    """The row's answer has a number."""
    expected_number(row.answer)


@checks_answer(check)
@declare_range(0.0, 1.0)
@judges_answer
def gsm8k(prompt: Prompt, rollout: Rollout) -> float:
    """0 or 1."""
    return float(expected_number(prompt.answer) in last_readings(rollout.text))
