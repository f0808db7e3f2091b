"""1 if the last number of the text is the number of the answer, else 0; commas and units do not count.

The answer is a number (`18`, `"1,200"`, `"$18"`, `"7/8"`) or GSM8K's own text, where the answer follows `####`.
`18.00` equals `18`; `scoring/verifiers.py` says what is a number. `12 million` in a text is 12,000,000 and also 12,
because some questions ask for millions. An answer with several numbers (`12:30`, `10^6`) or with a word such as
`million` is refused when the rows are loaded, because it names no single number.
"""

import re
from typing import Any

from podium.errors import InputError
from podium.reward.scoring.verifiers import answer_as_text, last_readings, numbers_in, verifier

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


@verifier(expected_number)
def gsm8k(text: str, expected: str) -> bool:
    """0 or 1."""
    return expected in last_readings(text)
