"""What surrounds the policy loss: the correction for the gap between sampler and trainer, and the KL term.

    w = min(exp(clamp(old − rollout, ±20)), cap)     per token, or of the geometric mean over a rollout; 0 outside
                                                     [1/band, band] (IcePop) and outside the rollout's sequence_band
    d = clamp(policy − reference, ±40),   k1 = d,   k2 = d²/2,   k3 = expm1(−d) + d,   k4 = exp(policy − old)·d

`old` is the trainer's logprob before the update, `rollout` the sampler's: they differ when the sampler lags behind or
rounds differently. With equal logprobs every weight is 1. k1 to k3 follow Schulman, "Approximating KL divergence"
(2020).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from podium.loss.objective.ratios import MAX_LOG_RATIO, mean_by_document, ratio_of
from podium.records import Batch

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
    drifts = [drift_from_reference(batch) for batch in batches]
    totals = {batch.minibatch: batch.num_loss_tokens for batch in batches}
    mean = sum_over_ranks(torch.stack([drift.sum() for drift in drifts]).sum()) / sum(totals.values())
    return [
        replace(batch, advantages=batch.advantages + coefficient * batch.loss_mask * (mean - drift))
        for batch, drift in zip(batches, drifts, strict=True)
    ]


def drift_from_reference(batch: Batch) -> torch.Tensor:
    """rollout − reference on loss tokens, 0 elsewhere."""
    assert batch.reference_logprobs is not None
    return (batch.rollout_logprobs - batch.reference_logprobs) * batch.loss_mask
