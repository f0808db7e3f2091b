"""Stage 6: what every loss shares. Per-token policy loss, times the correction weight, plus the KL term, averaged.

    loss = average over the step of  policy_loss_t · w_t  +  kl_beta · KL_t

A loss file computes `policy_loss_t`. The correction multiplies the policy term only, never the KL. The result for a
batch is its share of the whole optimizer step, so shares add up over batches and ranks. `checked_loss` checks what a
user's own loss returns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from podium.errors import InputError
from podium.loss.objective.ratios import average_loss
from podium.loss.objective.terms import Correction, Estimator, correction_weights, fold_into_advantages, kl_per_token
from podium.loss.objective.traits import Average
from podium.model.random_state import keeping_random_state
from podium.records import PER_TOKEN, Batch, LossOutput, PolicyLoss
from podium.settings.contracts import user_code
from podium.stages import PolicyLossFunction


@dataclass(frozen=True)
class Objective:
    """A policy loss with everything that the `[loss]` section adds to it."""

    policy_loss: PolicyLossFunction
    average: Average = "tokens"
    old: Literal["auto", "rollout"] = "auto"
    """Which logprobs the ratio divides by: the policy's before the first update, or the sampler's."""
    correction: Correction | None = None
    """None: off."""
    kl_beta: float = 0.0
    kl_estimator: Estimator | Literal["in_advantages"] = "k3"
    """"in_advantages": the KL changes the advantages and is no term of the loss."""

    @property
    def takes_snapshot(self) -> bool:
        """Whether several updates need the policy's logprobs from before the first update."""
        return self.old == "auto"

    def prepare(self, batches: Sequence[Batch], sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> list[Batch]:
        """Before the first update: adds the KL to the advantages if `kl_estimator` says so."""
        if self.kl_beta and self.kl_estimator == "in_advantages":
            return fold_into_advantages(batches, self.kl_beta, sum_over_ranks)
        return list(batches)

    def __call__(self, policy_logprobs: torch.Tensor, batch: Batch) -> LossOutput:
        old = self._old(policy_logprobs, batch)
        parts = self.policy_loss(policy_logprobs, old, batch)
        weights = correction_weights(old, batch, self.correction)
        per_token = parts.per_token * weights
        if parts.penalty is not None:
            per_token = per_token + parts.penalty
        policy = average_loss(per_token, batch, self.average)
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
        if not self.kl_beta or self.kl_estimator == "in_advantages":
            return policy_logprobs.new_zeros(())
        assert batch.reference_logprobs is not None, "the trainer fills them in if kl_beta is above 0"
        per_token = kl_per_token(policy_logprobs, old, batch.reference_logprobs, self.kl_estimator)
        return self.kl_beta * average_loss(per_token, batch, self.average)


def checked_loss(function: Callable[..., Any], name: str) -> PolicyLossFunction:
    """The same loss with its result checked at each call and its gradient checked once."""
    has_gradient = False

    def loss(policy_logprobs: torch.Tensor, old_logprobs: torch.Tensor, batch: Batch) -> PolicyLoss:
        nonlocal has_gradient
        parts = _called(function, name, policy_logprobs, old_logprobs, batch)
        if policy_logprobs.requires_grad and torch.is_grad_enabled() and not has_gradient:
            with keeping_random_state():
                _check_gradient(function, name, policy_logprobs, old_logprobs, batch)
            has_gradient = True
        return parts

    return loss


def _called(
    function: Callable[..., Any], name: str, policy_logprobs: torch.Tensor, old_logprobs: torch.Tensor, batch: Batch
) -> PolicyLoss:
    named = {f"batch.{field}": getattr(batch, field) for field in (*PER_TOKEN, "document_ids", "cu_seqlens")}
    named |= {"policy_logprobs": policy_logprobs, "old_logprobs": old_logprobs}
    before = {field: tensor._version for field, tensor in named.items() if tensor is not None}
    with user_code("loss.name", name):
        parts = function(policy_logprobs, old_logprobs, batch)
    changed = [field for field, version in before.items() if named[field]._version != version]
    if changed:
        raise InputError(
            f"loss.name = {name!r} changed {changed[0]} in place, but other code reads it too; make a new tensor, "
            "for example a * b instead of a.mul_(b)"
        )
    if not isinstance(parts, PolicyLoss):
        raise InputError(f"loss.name = {name!r} returned a {type(parts).__name__}; return podium.records.PolicyLoss")
    if getattr(parts.per_token, "shape", None) != policy_logprobs.shape:
        raise InputError(
            f"loss.name = {name!r}: per_token has the shape {list(getattr(parts.per_token, 'shape', ()))} "
            f"and the logprobs have {list(policy_logprobs.shape)}; return one value per token"
        )
    return parts


def _check_gradient(
    function: Callable[..., Any], name: str, policy_logprobs: torch.Tensor, old_logprobs: torch.Tensor, batch: Batch
) -> None:
    """Uses a copy of the logprobs, so that an error comes from the loss and not from the model."""
    alone = policy_logprobs.detach().clone().requires_grad_()
    parts = _called(function, name, alone, old_logprobs, batch)
    total = parts.per_token.sum() if parts.penalty is None else (parts.per_token + parts.penalty).sum()
    found = None
    if total.requires_grad:
        with user_code("loss.name", name):
            found = torch.autograd.grad(total, alone, allow_unused=True)[0]
    if found is None:
        raise InputError(
            f"loss.name = {name!r}: per_token has no gradient with respect to policy_logprobs, so the run would "
            "learn nothing; compute it from policy_logprobs without detach(), item() or no_grad()"
        )
