"""What every loss shares: per-token policy loss, times the correction weight, plus the KL term, averaged.

    loss = average over the step of  policy_loss_t · w_t  +  kl_beta · KL_t
    w = min(exp(clamp(old − rollout, ±20)), cap)     per token, or of the geometric mean over a rollout; 0 outside
                                                     [1/band, band] (IcePop) and outside the rollout's sequence_band
    d = clamp(policy − reference, ±40),   k1 = d,   k2 = d²/2,   k3 = expm1(−d) + d,   k4 = exp(policy − old)·d

A loss file computes `policy_loss_t` from the functions at the top. `old` is the trainer's logprob before the update,
`rollout` the sampler's. The result for a batch is its share of the whole optimizer step's average, so shares add up
over batches and ranks. k1 to k3 follow Schulman, "Approximating KL divergence" (2020).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from podium.errors import InputError
from podium.loss import Average
from podium.model.device_thread import keeping_random_state
from podium.records import PER_TOKEN, Batch, LossOutput, PolicyLoss
from podium.settings.contracts import user_code
from podium.stages import PolicyLossFunction

MAX_LOG_RATIO = 20.0
"""exp(20) is large but finite in float32; a larger ratio carries no information."""

Low = Annotated[float, Field(ge=0, le=1)]
High = Annotated[float, Field(ge=0)]
Bounds = Low | tuple[Low, High]
"""How far a ratio may be below and above 1, [low, high]; one number is both."""
_SCOPE = "outside [1 - low, 1 + high] carry no gradient; one number c is [c, c]"
Clip = Annotated[Bounds, Field(description=f"ratios {_SCOPE}")]
RolloutClip = Annotated[Bounds, Field(description=f"rollouts with a ratio {_SCOPE}")]


def ratio_of(policy_logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """exp(clamp(policy − other, ±20))"""
    return (policy_logprobs - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sum_by_document(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Sum over each document's loss tokens, spread back to all its tokens, `[T]`."""
    sums = values.new_zeros(batch.num_documents).index_add(0, batch.document_ids, values * batch.loss_mask)
    return sums[batch.document_ids]


def mean_by_document(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Mean over each document's loss tokens, spread back to all its tokens, `[T]`."""
    return sum_by_document(values, batch) / tokens_per_document(batch)[batch.document_ids]


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, clip: Bounds) -> PolicyLoss:
    """max(−r·A, −clamp(r, 1 − low, 1 + high)·A), and which bound took a gradient away."""
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - low, 1 + high) * advantages
    binds = (clipped > unclipped).detach()
    return PolicyLoss(
        per_token=torch.maximum(unclipped, clipped),
        ratio=ratio.detach(),
        clipped_low=binds & (ratio < 1 - low),
        clipped_high=binds & (ratio > 1 + high),
    )


def unclipped(per_token: torch.Tensor, ratio: torch.Tensor) -> PolicyLoss:
    """A loss without clip bounds."""
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyLoss(per_token, ratio.detach(), never, never)


def average_loss(per_token: torch.Tensor, batch: Batch, average: Average) -> torch.Tensor:
    """This batch's share of the step's average; tokens outside the loss mask do not count."""
    masked = per_token * batch.loss_mask
    if average == "tokens":
        return masked.sum() / batch.num_loss_tokens
    if isinstance(average, int):
        return masked.sum() / (batch.num_rollouts * average)
    return (masked / tokens_per_document(batch)[batch.document_ids]).sum() / batch.num_rollouts


def tokens_per_document(batch: Batch) -> torch.Tensor:
    """float `[N]`, loss tokens per document; at least 1, so that a fully masked document does not divide by zero."""
    counts = torch.zeros(batch.num_documents, dtype=batch.loss_mask.dtype, device=batch.loss_mask.device)
    return counts.index_add(0, batch.document_ids, batch.loss_mask).clamp(min=1)


SEQUENCE_BAND = (0.5, 2.0)
"""A rollout whose tokens are on average half or twice as likely to the trainer as to the sampler says nothing about the
policy: weights were mixed up or a rollout is broken. For a narrower band set `level = "sequence"` and `band`."""


@dataclass(frozen=True)
class Correction:
    level: Literal["token", "sequence"] = "token"
    """A weight is a token's ratio, or the geometric mean over its rollout. A product would drop long answers."""
    cap: float = 2.0
    """Largest weight."""
    band: float | None = None
    """Weights with a ratio outside [1/band, band] become 0; None: off."""
    sequence_band: tuple[float, float] | None = SEQUENCE_BAND
    """A rollout whose geometric mean is outside gets weight 0; None: off."""


def correction_weights(old: torch.Tensor, batch: Batch, correction: Correction | None) -> torch.Tensor:
    """`[T]` without gradient; 1 everywhere if the correction is off."""
    if correction is None:
        return torch.ones_like(batch.loss_mask)
    gap = ((old - batch.rollout_logprobs) * batch.loss_mask).detach()  # prompt positions hold no logprobs
    of_rollout = mean_by_document(gap, batch)
    chosen = gap if correction.level == "token" else of_rollout
    ratio = chosen.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weights = ratio.clamp(max=correction.cap)
    if correction.band is not None:
        weights = weights * ((ratio >= 1 / correction.band) & (ratio <= correction.band))
    if correction.sequence_band is not None:
        low, high = (math.log(bound) for bound in correction.sequence_band)
        weights = weights * ((of_rollout >= low) & (of_rollout <= high))
    return weights


Estimator = Literal["k1", "k2", "k3", "k4"]
"""All keep their gradient. The gradient of k1 is that of the policy's logprob, whose expectation over the policy's own
rollouts is 0; settings that choose k1 cause a warning."""
MAX_DRIFT = 40.0


def kl_per_token(
    policy_logprobs: torch.Tensor, old: torch.Tensor, reference: torch.Tensor, estimator: Estimator
) -> torch.Tensor:
    """`[T]`; only the values of loss tokens are meaningful."""
    d = (policy_logprobs - reference).clamp(-MAX_DRIFT, MAX_DRIFT)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d**2 / 2
    if estimator == "k3":
        return torch.expm1(-d) + d
    return ratio_of(policy_logprobs, old) * d


def fold_into_advantages(
    batches: Sequence[Batch], coefficient: float, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]
) -> list[Batch]:
    """A_t += coefficient · m_t · (mean d − d_t), d = rollout − reference, with the mean over the step's loss tokens.

    This replaces the KL term in the loss: tokens that drift further from the reference than average get less credit.
    """
    drifts = [
        (batch.rollout_logprobs - batch.reference_logprobs) * batch.loss_mask  # type: ignore[operator]
        for batch in batches
    ]
    totals = {batch.minibatch: batch.num_loss_tokens for batch in batches}
    mean = sum_over_ranks(torch.stack([drift.sum() for drift in drifts]).sum()) / sum(totals.values())
    return [
        replace(batch, advantages=batch.advantages + coefficient * batch.loss_mask * (mean - drift))
        for batch, drift in zip(batches, drifts, strict=True)
    ]


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
        if self.old == "rollout":
            old = batch.rollout_logprobs
        else:
            old = policy_logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
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

    def _kl(self, policy_logprobs: torch.Tensor, old: torch.Tensor, batch: Batch) -> torch.Tensor:
        if not self.kl_beta or self.kl_estimator == "in_advantages":
            return policy_logprobs.new_zeros(())
        assert batch.reference_logprobs is not None, "the trainer fills them in if kl_beta is above 0"
        per_token = kl_per_token(policy_logprobs, old, batch.reference_logprobs, self.kl_estimator)
        return self.kl_beta * average_loss(per_token, batch, self.average)


def checked_loss(function: Callable[..., Any], name: str) -> PolicyLossFunction:
    """A user's loss with its result checked at each call and its gradient checked once."""
    has_gradient = False

    def call(policy_logprobs: torch.Tensor, old_logprobs: torch.Tensor, batch: Batch) -> PolicyLoss:
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
            raise InputError(
                f"loss.name = {name!r} returned a {type(parts).__name__}; return podium.records.PolicyLoss"
            )
        if (shape := getattr(parts.per_token, "shape", ())) != policy_logprobs.shape:
            raise InputError(
                f"loss.name = {name!r}: per_token has the shape {list(shape)} and the logprobs have "
                f"{list(policy_logprobs.shape)}; return one value per token"
            )
        return parts

    def check_gradient(policy_logprobs: torch.Tensor, old_logprobs: torch.Tensor, batch: Batch) -> None:
        """Uses a copy of the logprobs, so that an error comes from the loss and not from the model."""
        alone = policy_logprobs.detach().clone().requires_grad_()
        parts = call(alone, old_logprobs, batch)
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

    def loss(policy_logprobs: torch.Tensor, old_logprobs: torch.Tensor, batch: Batch) -> PolicyLoss:
        nonlocal has_gradient
        parts = call(policy_logprobs, old_logprobs, batch)
        if policy_logprobs.requires_grad and torch.is_grad_enabled() and not has_gradient:
            with keeping_random_state():
                check_gradient(policy_logprobs, old_logprobs, batch)
            has_gradient = True
        return parts

    return loss
