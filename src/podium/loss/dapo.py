"""DAPO: GRPO's loss with a wider upper bound, so that unlikely tokens can grow, and an optional dual clip.

    loss = max(−r·A, −clamp(r, 1 − clip_low, 1 + clip_high)·A)
    with a dual clip c > 1:  where A < 0,  min(loss, −c·A)

From DAPO (arXiv 2503.14476); the dual clip from arXiv 1912.09729 bounds the loss of a token whose ratio explodes.
"""

from typing import Annotated

import torch
from pydantic import Field

from podium.loss._ratio import clipped_surrogate, ratio_of
from podium.records import Batch, PolicyLoss


def dapo(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    batch: Batch,
    *,
    clip_low: Annotated[float, Field(ge=0, le=1, description="ratios below 1 − clip_low carry no gradient")] = 0.2,
    clip_high: Annotated[float, Field(ge=0, description="ratios above 1 + clip_high carry no gradient")] = 0.28,
    dual_clip: Annotated[
        float | None, Field(gt=1, description="where the advantage is negative, no ratio counts for more than this")
    ] = None,
) -> PolicyLoss:
    loss = clipped_surrogate(ratio_of(policy_logprobs, old_logprobs), batch.advantages, clip_low, clip_high)
    if dual_clip is None:
        return loss
    bound = -dual_clip * batch.advantages
    binds = (batch.advantages < 0) & (loss.per_token > bound)
    return PolicyLoss(
        per_token=torch.where(batch.advantages < 0, torch.minimum(loss.per_token, bound), loss.per_token),
        ratio=loss.ratio,
        clipped_low=loss.clipped_low,
        clipped_high=loss.clipped_high | binds,
    )
