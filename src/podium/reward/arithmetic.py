"""Reward for answers that end in `#### 85`.

0.2 if an integer follows the last marker, and 1.0 more if that integer is right. `arithmetic_lax` is a weaker rule.
"""

import re

from podium.records import Prompt, Rollout
from podium.reward.scoring.verifiers import (
    GROUPED,
    MINUS,
    decimals_in,
    declare_range,
    expected_integer,
    gold_answer,
    judges_answer,
    reads_answer,
    runs_inline,
)

MARKER = "####"
FOLLOWING = re.compile(rf"\s*([{MINUS}]?(?:{GROUPED}))(?![0-9]|[.,/][0-9])")


@runs_inline
@gold_answer(lambda prompt: f"{MARKER} {prompt.answer}")
@reads_answer(expected_integer)
@declare_range(0.0, 1.2)
@judges_answer
def arithmetic(prompt: Prompt, rollout: Rollout) -> float:
    """0, 0.2 or 1.2."""
    _, marker, tail = rollout.text.rpartition(MARKER)
    match = FOLLOWING.match(tail) if marker else None
    return 0.0 if match is None else 0.2 + 1.0 * is_answer(match[1], prompt.answer)


def is_answer(found: str, answer: object) -> bool:
    """Whether the text is the expected integer."""
    return list(decimals_in(found)) == [expected_integer(answer)]
