"""Direct reward optimisation: a quadratic penalty keeps the policy near the sampler instead of a clip.

    loss = −(policy·A·w − ½·beta·(policy − rollout)²)

From arXiv 2405.19107. The penalty is the distance to the sampler: a distance to `old` would vanish with one update per
batch. The penalty also applies where A = 0, never outside the loss mask, and the correction weight w does not change
it. There is no ratio: the penalty makes rollouts of another policy usable. With beta = 0 the loss is correct only for
one update per batch.
"""

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field

from podium.loss import loss_traits
from podium.loss.objective import ratio_of, unclipped
from podium.records import Batch, PolicyLoss


@loss_traits(on_policy_with={"beta": 0})
def dro(
    policy_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    batch: Batch,
    *,
    beta: Annotated[float, Field(ge=0, description="weight of the penalty")] = 0.05,
) -> PolicyLoss:
    loss = unclipped(-policy_logprobs * batch.advantages, ratio_of(policy_logprobs, old_logprobs))
    return replace(loss, penalty=0.5 * beta * (policy_logprobs - batch.rollout_logprobs) ** 2)
