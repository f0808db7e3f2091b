"""Sequence-level clipped loss: the ratio of a rollout is the geometric mean over its tokens.

    s = mean over the rollout's loss tokens of (policy − old)
    r_t = exp(clamp(policy_t − sg(policy_t) + sg(s), max=10)),   clipped as in GRPO

From GSPO (arXiv 2507.18071), in its token form: every token has the value of the sequence ratio and keeps its own
gradient. Averaged per rollout.
"""

import torch

from podium.loss import loss_traits
from podium.loss.objective import RolloutClip, clipped_surrogate, mean_by_document
from podium.records import Batch, PolicyLoss


@loss_traits(average="rollouts", correction_level="sequence")
def gspo(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    batch: Batch,
    *,
    clip: RolloutClip = (3e-4, 4e-4),
) -> PolicyLoss:
    of_rollout = mean_by_document(policy_logprobs.detach() - old_logprobs, batch)
    ratio = (policy_logprobs - policy_logprobs.detach() + of_rollout).clamp(max=10).exp()
    return clipped_surrogate(ratio, batch.advantages, clip)
