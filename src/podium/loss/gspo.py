"""Sequence-level clipped loss: the ratio of a rollout is the geometric mean over its tokens.

    s = mean over the rollout's loss tokens of (policy − old)
    r_t = exp(clamp(policy_t − sg(policy_t) + sg(s), max=10)),   clipped as in GRPO

From GSPO (arXiv 2507.18071), in its token form: the value is that of the sequence ratio, and each token keeps its own
gradient. Averaged per rollout.
"""

from typing import Annotated

import torch
from pydantic import Field

from podium.loss._ratio import clipped_surrogate, mean_by_document
from podium.loss._traits import loss_traits
from podium.records import Batch, PolicyLoss


@loss_traits(average="rollouts", correction_level="sequence")
def gspo(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    batch: Batch,
    *,
    clip_low: Annotated[float, Field(ge=0, le=1, description="below 1 − clip_low a rollout has no gradient")] = 3e-4,
    clip_high: Annotated[float, Field(ge=0, description="above 1 + clip_high a rollout has no gradient")] = 4e-4,
) -> PolicyLoss:
    of_rollout = mean_by_document(policy_logprobs.detach() - old_logprobs, batch)
    ratio = (policy_logprobs - policy_logprobs.detach() + of_rollout).clamp(max=10).exp()
    return clipped_surrogate(ratio, batch.advantages, clip_low, clip_high)
