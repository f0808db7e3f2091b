"""Estimators of KL(policy ‖ reference) from the sampled tokens, d = clamp(policy − reference, ±40).

    k1 = d          k2 = d²/2          k3 = expm1(−d) + d          k4 = r·d,  r = exp(policy − old)

k1 to k3 after Schulman, "Approximating KL divergence" (2020); all keep their gradient. That of k1 is the gradient of
the policy's logprob alone, whose expectation over the policy's own rollouts is 0: a run that asks for it is warned.
`fold_into_advantages` is the form without a term in the loss: tokens that drift further from the reference than the
step's average are credited less.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch

from podium.loss._ratio import ratio_of
from podium.records import Batch

Estimator = Literal["k1", "k2", "k3", "k4"]
MAX_LOG_RATIO = 40.0


def kl_per_token(
    policy_logprobs: torch.Tensor, old: torch.Tensor, reference: torch.Tensor, estimator: Estimator
) -> torch.Tensor:
    """`[T]`; only its loss tokens mean anything."""
    d = (policy_logprobs - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
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
    """A_t += coefficient · m_t · (mean d − d_t), d = rollout − reference, the mean over the step's loss tokens."""
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
