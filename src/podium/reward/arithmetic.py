"""Reward for answers that end in `#### 85`.

0.2 if an integer follows the last marker, and 1.0 more if it is the right one. `fallback` is a laxer rule (0.2 for
the bare marker, and the last integer of the text counts); a policy trained on it learns to write the marker without
a number, so it is not the default.
"""

import re
from typing import Annotated

from pydantic import Field

from podium.records import Prompt, Rollout, Row
from podium.reward._contract import checks_answer, declare_range, gold_answer, runs_inline
from podium.reward._numbers import GROUPED, MINUS, decimals_in, expected_integer
from podium.reward._thinking import judges_answer

MARKER = "####"
INTEGER = r"-?[0-9]+(?!\.?[0-9])"
FOLLOWING = re.compile(rf"\s*([{MINUS}]?(?:{GROUPED}))(?![0-9]|[.,/][0-9])")


def check(row: Row) -> None:
    """The row's answer is an integer."""
    expected_integer(row.answer)


@runs_inline
@gold_answer(lambda prompt: f"{MARKER} {prompt.answer}")
@checks_answer(check)
@declare_range(0.0, 1.2)
@judges_answer
def arithmetic(
    prompt: Prompt,
    rollout: Rollout,
    *,
    fallback: Annotated[bool, Field(description="score the bare marker and the last integer of the text")] = False,
) -> float:
    """0, 0.2, 1.0 (only with `fallback`) or 1.2."""
    _, marker, tail = rollout.text.rpartition(MARKER)
    if fallback:
        found = re.findall(INTEGER, rollout.text)
        return 0.2 * bool(marker) + 1.0 * bool(found and _same(found[-1], prompt.answer))
    match = FOLLOWING.match(tail) if marker else None
    return 0.0 if match is None else 0.2 + 1.0 * _same(match[1], prompt.answer)


def _same(found: str, answer: object) -> bool:
    return list(decimals_in(found)) == [expected_integer(answer)]
