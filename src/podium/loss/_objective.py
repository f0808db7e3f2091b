"""Stage 6: what every loss shares. Per-token policy loss, times the correction weight, plus the KL term, averaged.

    loss = average over the step of  policy_loss_t · w_t  +  kl_beta · KL_t

A loss file gives the first factor. The correction multiplies the policy term only, never the KL. The share that is
returned is of the whole optimizer step, so shares add up over batches and ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from podium.loss._average import average_loss
from podium.loss._correction import Correction, correction_weights
from podium.loss._kl import Estimator, fold_into_advantages, kl_per_token
from podium.loss._traits import Average
from podium.records import Batch, LossOutput
from podium.stages import PolicyLossFunction


@dataclass(frozen=True)
class Objective:
    """A loss with all that the `[loss]` section says around it."""

    policy_loss: PolicyLossFunction
    average: Average = "tokens"
    constant: int = 1
    """The length that `average = "constant"` divides by."""
    old: Literal["auto", "rollout"] = "auto"
    """Whose logprobs the ratio is against: the policy's before the first update, or the sampler's."""
    correction: Correction | None = None
    """None: off."""
    kl_beta: float = 0.0
    kl_estimator: Estimator = "k3"
    kl_in: Literal["loss", "advantage"] = "loss"

    @property
    def takes_snapshot(self) -> bool:
        """Whether several updates need the policy's logprobs from before the first."""
        return self.old == "auto"

    def prepare(self, batches: Sequence[Batch], sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> list[Batch]:
        """Before the first update: the KL goes into the advantages, where that is asked for."""
        if self.kl_beta and self.kl_in == "advantage":
            return fold_into_advantages(batches, self.kl_beta, sum_over_ranks)
        return list(batches)

    def __call__(self, policy_logprobs: torch.Tensor, batch: Batch) -> LossOutput:
        old = self._old(policy_logprobs, batch)
        parts = self.policy_loss(policy_logprobs, old, batch)
        weights = correction_weights(old, batch, self.correction)
        per_token = parts.per_token * weights
        if parts.penalty is not None:
            per_token = per_token + parts.penalty
        policy = average_loss(per_token, batch, self.average, self.constant)
        kl = self._kl(policy_logprobs, old, batch)
        return LossOutput(
            loss=policy + kl,
            policy_loss=policy.detach(),
            kl_loss=kl.detach(),
            weights=weights,
            drift=None if batch.reference_logprobs is None else policy_logprobs.detach() - batch.reference_logprobs,
            ratio=parts.ratio,
            clipped_low=parts.clipped_low,
            clipped_high=parts.clipped_high,
        )

    def _old(self, policy_logprobs: torch.Tensor, batch: Batch) -> torch.Tensor:
        if self.old == "rollout":
            return batch.rollout_logprobs
        return policy_logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs

    def _kl(self, policy_logprobs: torch.Tensor, old: torch.Tensor, batch: Batch) -> torch.Tensor:
        if not self.kl_beta or self.kl_in == "advantage":
            return policy_logprobs.new_zeros(())
        assert batch.reference_logprobs is not None, "the trainer fills them in where kl_beta is above 0"
        per_token = kl_per_token(policy_logprobs, old, batch.reference_logprobs, self.kl_estimator)
        return self.kl_beta * average_loss(per_token, batch, self.average, self.constant)
