"""Reward for sums whose answer may stand anywhere: 0.2 for the marker `####`, and 1.0 if the last integer is right.

For models that never write the marker with a number at first. A policy trained on this rule learns to write the bare
marker, so `arithmetic` is the better reward where it gives any signal.
"""

import re

from podium.reward.arithmetic import MARKER, after_marker
from podium.reward.scoring.verifiers import decimals_in, expected_integer, verifier

INTEGER = re.compile(r"-?[0-9]+(?!\.?[0-9])")


@verifier(expected_integer, gold=after_marker, highest=1.2, inline=True)
def arithmetic_lax(text: str, expected: str) -> float:
    """0, 0.2, 1.0 or 1.2."""
    found = INTEGER.findall(text)
    return 0.2 * (MARKER in text) + 1.0 * bool(found and list(decimals_in(found[-1])) == [expected])
