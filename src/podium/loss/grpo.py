"""GRPO's clipped policy-gradient loss.

    r = exp(clamp(policy − old, ±20))
    loss = max(−r·A, −clamp(r, 1 − clip_low, 1 + clip_high)·A)      per token

From DeepSeekMath (arXiv 2402.03300), after PPO (arXiv 1707.06347). With one update per batch `old` is the policy
itself, r = 1, and the clip cannot bind: the gradient is that of −A · policy.
"""

from typing import Annotated

import torch
from pydantic import Field

from podium.loss._average import Average, average_loss
from podium.records import Batch, LossOutput

MAX_LOG_RATIO = 20.0
"""exp(20) is large but finite in float32; beyond it a ratio says nothing any more."""


def grpo(
    policy_logprobs: torch.Tensor,
    batch: Batch,
    *,
    clip_low: Annotated[float, Field(ge=0, le=1, description="ratios below 1 − clip_low carry no gradient")] = 0.2,
    clip_high: Annotated[float, Field(ge=0, description="ratios above 1 + clip_high carry no gradient")] = 0.2,
    average: Annotated[Average, Field(description="over tokens or over rollouts")] = "tokens",
) -> LossOutput:
    """This batch's share of the step's loss."""
    old = policy_logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    ratio = (policy_logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = -ratio * batch.advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * batch.advantages
    binds = clipped > unclipped
    return LossOutput(
        loss=average_loss(torch.maximum(unclipped, clipped), batch, average),
        ratio=ratio.detach(),
        clipped_low=binds & (ratio < 1 - clip_low),
        clipped_high=binds & (ratio > 1 + clip_high),
    )
