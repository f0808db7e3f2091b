"""The advantage times the mean logprob of the answer.

    loss = −A · mean_t policy_t      per rollout

The simplest form of a group-relative update: no ratio, no clip. It is correct on-policy only: one update per batch, and
a sampler that holds the weights that are updated.
"""

import torch

from podium.loss import loss_traits
from podium.loss.objective import ratio_of, unclipped
from podium.records import Batch, PolicyLoss


@loss_traits(average="rollouts", corrects_itself=True, on_policy=True)
def mean_logprob(policy_logprobs: torch.Tensor, old_logprobs: torch.Tensor, batch: Batch) -> PolicyLoss:
    return unclipped(-policy_logprobs * batch.advantages, ratio_of(policy_logprobs, old_logprobs))
