"""More for a longer text: characters / `full_at`, at most 1. For trying out a set-up, not for training.

Needs no answer. A policy reaches the highest score within a few steps, so it shows that a run learns at all.
"""

from typing import Annotated

from pydantic import Field

from podium.records import Prompt, Rollout
from podium.reward.scoring.verifiers import declare_range, gold_answer


@gold_answer("it scores the length, not the answer")
@declare_range(0.0, 1.0)
def length(
    prompt: Prompt,
    rollout: Rollout,
    *,
    full_at: Annotated[int, Field(ge=1, description="characters that score 1")] = 500,
) -> float:
    """0 … 1."""
    return min(1.0, len(rollout.text) / full_at)
