"""Reward for answers that end in `#### 85`.

0.2 if an integer follows the last marker, and 1.0 more if that integer is right. `arithmetic_lax` is a weaker rule.
"""

import re

from podium.records import Prompt
from podium.reward.scoring.verifiers import GROUPED, MINUS, decimals_in, expected_integer, verifier

MARKER = "####"
FOLLOWING = re.compile(rf"\s*([{MINUS}]?(?:{GROUPED}))(?![0-9]|[.,/][0-9])")


def after_marker(prompt: Prompt) -> str:
    """The row's answer as a right rollout gives it."""
    return f"{MARKER} {prompt.answer}"


@verifier(expected_integer, gold=after_marker, highest=1.2, inline=True)
def arithmetic(text: str, expected: str) -> float:
    """0, 0.2 or 1.2."""
    _, marker, tail = text.rpartition(MARKER)
    match = FOLLOWING.match(tail) if marker else None
    return 0.0 if match is None else 0.2 + 1.0 * (list(decimals_in(match[1])) == [expected])
