"""Reward for sums whose answer may stand anywhere: 0.2 for the marker `####`, and 1.0 if the last integer is right.

For models that never write the marker with a number at first. A policy trained on this rule learns to write the bare
marker, so `arithmetic` is the better reward where it gives any signal.
"""

import re

from podium.records import Prompt, Rollout
from podium.reward.arithmetic import MARKER, is_answer
from podium.reward.scoring.verifiers import (
    declare_range,
    expected_integer,
    gold_answer,
    judges_answer,
    reads_answer,
    runs_inline,
)

INTEGER = re.compile(r"-?[0-9]+(?!\.?[0-9])")


@runs_inline
@gold_answer(lambda prompt: f"{MARKER} {prompt.answer}")
@reads_answer(expected_integer)
@declare_range(0.0, 1.2)
@judges_answer
def arithmetic_lax(prompt: Prompt, rollout: Rollout) -> float:
    """0, 0.2, 1.0 or 1.2."""
    found = INTEGER.findall(rollout.text)
    return 0.2 * (MARKER in rollout.text) + 1.0 * bool(found and is_answer(found[-1], prompt.answer))
