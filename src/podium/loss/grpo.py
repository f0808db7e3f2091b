"""GRPO's clipped policy-gradient loss.

    r = exp(clamp(policy − old, ±20))
    loss = max(−r·A, −clamp(r, 1 − low, 1 + high)·A)      per token, clip = [low, high]

From DeepSeekMath (arXiv 2402.03300), after PPO (arXiv 1707.06347). With one update per batch `old` is the policy
itself, r = 1, and the clip cannot bind: the gradient is that of −A · policy.
"""

import torch

from podium.loss.objective import Clip, clipped_surrogate, ratio_of
from podium.records import Batch, PolicyLoss


def grpo(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    batch: Batch,
    *,
    clip: Clip = (0.2, 0.2),
) -> PolicyLoss:
    return clipped_surrogate(ratio_of(policy_logprobs, old_logprobs), batch.advantages, clip)
