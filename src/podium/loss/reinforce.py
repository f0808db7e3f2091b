"""REINFORCE, by default weighted by the ratio to the sampler.

    ratio = true:   loss = −exp(clamp(policy − rollout, ±20))·A
    ratio = false:  loss = −A·policy

From Williams (1992). The ratio divides by the sampler's logprobs, so it already corrects for a sampler that lags or
rounds differently, and no other correction is applied. Without the ratio the loss is correct on-policy only: one update
per batch, and a sampler that holds the weights that are updated.
"""

from typing import Annotated

import torch
from pydantic import Field

from podium.loss import loss_traits
from podium.loss.objective import ratio_of, unclipped
from podium.records import Batch, PolicyLoss


@loss_traits(corrects_itself=True, on_policy_with={"ratio": False})
def reinforce(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    batch: Batch,
    *,
    ratio: Annotated[bool, Field(description="weight by the ratio to the sampler")] = True,
) -> PolicyLoss:
    to_sampler = ratio_of(policy_logprobs, batch.rollout_logprobs)
    return unclipped(-(to_sampler if ratio else policy_logprobs) * batch.advantages, to_sampler)
