"""DAPO: GRPO's loss with a higher upper bound, so that unlikely tokens can become likely, and an optional dual clip.

    loss = max(−r·A, −clamp(r, 1 − low, 1 + high)·A)     clip = [low, high]
    with a dual clip c > 1:  where A < 0,  min(loss, −c·A)

From DAPO (arXiv 2503.14476); the dual clip from arXiv 1912.09729 bounds the loss of a token whose ratio explodes.
"""

from typing import Annotated

import torch
from pydantic import Field

from podium.loss.objective import Clip, clipped_surrogate, ratio_of
from podium.records import Batch, PolicyLoss


def dapo(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    batch: Batch,
    *,
    clip: Clip = (0.2, 0.28),
    dual_clip: Annotated[
        float | None, Field(gt=1, description="for negative advantages, ratios count at most this much")
    ] = None,
) -> PolicyLoss:
    loss = clipped_surrogate(ratio_of(policy_logprobs, old_logprobs), batch.advantages, clip)
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
