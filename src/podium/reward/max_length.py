"""1 at the target length in tokens, falling linearly to 0 at `zero_at` tokens more or fewer.

The answer of a row is its target. All tokens of the rollout count, the stop token included.
"""

import math
from typing import Annotated, Any

from pydantic import Field

from podium.errors import InputError
from podium.records import Prompt, Rollout
from podium.reward.scoring.verifiers import declare_range, gold_answer, reads_answer


def target_tokens(answer: Any) -> float:
    """The target, from a number or its text."""
    try:
        target = math.nan if isinstance(answer, bool) else float(answer)
    except (TypeError, ValueError, OverflowError):
        target = math.nan
    if not 0 < target < math.inf:
        raise InputError(f"the answer must be a number of tokens above 0, not {answer!r:.60}")
    return target


@gold_answer("it scores the length, not the answer")
@reads_answer(target_tokens)
@declare_range(0.0, 1.0)
def max_length(
    prompt: Prompt,
    rollout: Rollout,
    *,
    zero_at: Annotated[int, Field(ge=1, description="distance from the target, in tokens, that scores 0")] = 8192,
) -> float:
    """0 … 1."""
    return max(0.0, 1.0 - abs(rollout.num_written - target_tokens(prompt.answer)) / zero_at)
