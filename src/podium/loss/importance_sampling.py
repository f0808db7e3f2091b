"""Off-policy gradient weighted by the probability ratio, not clipped.

    loss = −r·A,   r = exp(clamp(policy − old, ±20)), optionally truncated at max_ratio

The ratio keeps its gradient; a token truncated at `max_ratio` has none.
"""

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field

from podium.loss.objective import ratio_of, unclipped
from podium.records import Batch, PolicyLoss


def importance_sampling(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    batch: Batch,
    *,
    max_ratio: Annotated[float | None, Field(gt=0, description="ratios are truncated here; default: no limit")] = None,
) -> PolicyLoss:
    ratio = ratio_of(policy_logprobs, old_logprobs)
    if max_ratio is None:
        return unclipped(-ratio * batch.advantages, ratio)
    truncated = unclipped(-ratio.clamp(max=max_ratio) * batch.advantages, ratio)
    return replace(truncated, clipped_high=(ratio > max_ratio) & (batch.advantages != 0))
