"""CISPO: the clipped ratio is a weight without gradient, so every token keeps a gradient, clipped or not.

    loss = −sg(clamp(r, 1 − clip_low, 1 + clip_high))·A·policy

From MiniMax-M1 (arXiv 2506.13585). `clip_low = "none"` leaves the weight unbounded below.
"""

from typing import Annotated, Literal

import torch
from pydantic import Field

from podium.loss._ratio import ratio_of
from podium.records import Batch, PolicyLoss


def cispo(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    batch: Batch,
    *,
    clip_low: Annotated[
        Annotated[float, Field(ge=0, le=1)] | Literal["none"], Field(description="the weight is at least 1 − clip_low")
    ] = 0.2,
    clip_high: Annotated[float, Field(ge=0, description="the weight is at most 1 + clip_high")] = 0.28,
) -> PolicyLoss:
    ratio = ratio_of(policy_logprobs, old_logprobs).detach()
    low = 0.0 if clip_low == "none" else 1 - clip_low
    weight = ratio.clamp(low, 1 + clip_high)
    return PolicyLoss(
        per_token=-weight * batch.advantages * policy_logprobs,
        ratio=ratio,
        clipped_low=ratio < low,
        clipped_high=ratio > 1 + clip_high,
    )
