"""PPO's clip on whole answers: the ratio of summed logprobs, one a rollout.

    r = exp(clamp(Σ_t policy − Σ_t old, ±20)),   loss = max(−r·A, −clamp(r, 1 ± clip)·A)   a rollout

Each rollout counts once, whatever its length. The ratio of a long answer leaves the clip range quickly; `gspo` is the
length-normalised form.
"""

from typing import Annotated

import torch
from pydantic import Field

from podium.loss._ratio import clipped_surrogate, ratio_of, sum_by_document
from podium.loss._traits import loss_traits
from podium.records import Batch, PolicyLoss


@loss_traits(average="rollouts", correction_level="sequence")
def sequence(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    batch: Batch,
    *,
    clip_low: Annotated[float, Field(ge=0, le=1, description="below 1 − clip_low a rollout has no gradient")] = 0.2,
    clip_high: Annotated[float, Field(ge=0, description="above 1 + clip_high a rollout has no gradient")] = 0.2,
) -> PolicyLoss:
    # The same value on every token of a rollout: its mean over the rollout is the rollout's loss.
    ratio = ratio_of(sum_by_document(policy_logprobs, batch), sum_by_document(old_logprobs, batch))
    return clipped_surrogate(ratio, batch.advantages, clip_low, clip_high)
