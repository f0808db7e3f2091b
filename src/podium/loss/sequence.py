"""PPO's clip on whole answers: the ratio of summed logprobs, one per rollout.

    r = exp(clamp(Σ_t policy − Σ_t old, ±20)),   loss = max(−r·A, −clamp(r, 1 ± clip)·A)   per rollout

Each rollout counts once, whatever its length. The ratio of a long answer leaves the clip range quickly; `gspo` is the
length-normalised form.
"""

import torch

from podium.loss import loss_traits
from podium.loss.objective import RolloutClip, clipped_surrogate, ratio_of, sum_by_document
from podium.records import Batch, PolicyLoss


@loss_traits(average="rollouts", correction_level="sequence")
def sequence(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    batch: Batch,
    *,
    clip: RolloutClip = (0.2, 0.2),
) -> PolicyLoss:
    # Every token of a rollout has the same value, so the mean over its tokens is the rollout's loss.
    ratio = ratio_of(sum_by_document(policy_logprobs, batch), sum_by_document(old_logprobs, batch))
    return clipped_surrogate(ratio, batch.advantages, clip)
