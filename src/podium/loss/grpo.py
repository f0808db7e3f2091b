"""GRPO's clipped policy-gradient loss.

    r = exp(clamp(policy − old, ±20))
    loss = max(−r·A, −clamp(r, 1 − clip_low, 1 + clip_high)·A)      per token

From DeepSeekMath (arXiv 2402.03300), after PPO (arXiv 1707.06347). With one update per batch `old` is the policy
itself, r = 1, and the clip cannot bind: the gradient is that of −A · policy.
"""

from typing import Annotated

import torch
from pydantic import Field

from podium.loss._ratio import clipped_surrogate, ratio_of
from podium.records import Batch, PolicyLoss


def grpo(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    batch: Batch,
    *,
    clip_low: Annotated[float, Field(ge=0, le=1, description="ratios below 1 − clip_low carry no gradient")] = 0.2,
    clip_high: Annotated[float, Field(ge=0, description="ratios above 1 + clip_high carry no gradient")] = 0.2,
) -> PolicyLoss:
    return clipped_surrogate(ratio_of(policy_logprobs, old_logprobs), batch.advantages, clip_low, clip_high)
