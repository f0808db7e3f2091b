"""DAPO's soft penalty: 0 up to `free_tokens`, then falling linearly to −1 over `buffer_tokens` more, −1 beyond.

With DAPO's L_max and L_cache: free_tokens = L_max − L_cache, buffer_tokens = L_cache. Needs no answer. All tokens of
the rollout count, the stop token included. The highest value is 0, so an answer that is too long is not correct, and
otherwise "correct" means what the other rewards say.
"""

from typing import Annotated

from pydantic import Field

from podium.records import Prompt, Rollout
from podium.reward.scoring.verifiers import declare_range, gold_answer


@gold_answer("it scores the length, not the answer")
@declare_range(-1.0, 0.0)
def overlong(
    prompt: Prompt,
    rollout: Rollout,
    *,
    free_tokens: Annotated[int, Field(ge=0, description="tokens without a penalty")],
    buffer_tokens: Annotated[int, Field(ge=1, description="tokens over which it falls to -1")],
) -> float:
    """−1 … 0."""
    excess = max(0, rollout.num_written - free_tokens)
    return 0.0 - min(1.0, excess / buffer_tokens)
