"""CISPO: the clipped ratio is a weight without gradient, so every token keeps a gradient, clipped or not.

    loss = −sg(clamp(r, 1 − low, 1 + high))·A·policy     clip = [low, high]

From MiniMax-M1 (arXiv 2506.13585). `clip = ["none", high]` has no lower bound.
"""

from typing import Annotated, Literal

import torch
from pydantic import Field

from podium.loss.objective import Bounds, High, ratio_of
from podium.records import Batch, PolicyLoss


def cispo(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    batch: Batch,
    *,
    clip: Annotated[
        Bounds | tuple[Literal["none"], High],
        Field(description='bounds of the weight, [1 - low, 1 + high]; one number c is [c, c]; low may be "none"'),
    ] = (0.2, 0.28),
) -> PolicyLoss:
    ratio = ratio_of(policy_logprobs, old_logprobs).detach()
    below, above = clip if isinstance(clip, tuple) else (clip, clip)
    low, high = 0.0 if below == "none" else 1 - below, 1 + above
    weight = ratio.clamp(low, high)
    return PolicyLoss(
        per_token=-weight * batch.advantages * policy_logprobs,
        ratio=ratio,
        clipped_low=ratio < low,
        clipped_high=ratio > high,
    )
