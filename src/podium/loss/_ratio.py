"""Probability ratios, per token and per rollout, and the clipped surrogate that several losses are built on."""

import torch

from podium.loss._average import tokens_per_document
from podium.records import Batch, PolicyLoss

MAX_LOG_RATIO = 20.0
"""exp(20) is large but finite in float32; beyond it a ratio says nothing any more."""


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


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    """max(−r·A, −clamp(r, 1 − clip_low, 1 + clip_high)·A), and which bound took a gradient away."""
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    binds = (clipped > unclipped).detach()
    return PolicyLoss(
        per_token=torch.maximum(unclipped, clipped),
        ratio=ratio.detach(),
        clipped_low=binds & (ratio < 1 - clip_low),
        clipped_high=binds & (ratio > 1 + clip_high),
    )


def unclipped(per_token: torch.Tensor, ratio: torch.Tensor) -> PolicyLoss:
    """A loss that has no clip bounds."""
    never = torch.zeros_like(ratio, dtype=torch.bool)
    return PolicyLoss(per_token, ratio.detach(), never, never)
