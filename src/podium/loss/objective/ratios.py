"""What loss files are built from: probability ratios, the clipped surrogate, and the average over a step.

A batch is a part of an optimizer step. Its average is its share of the whole step's average, so shares add up over
batches and ranks and the result does not depend on how the step was split.
"""

from typing import Annotated

import torch
from pydantic import Field

from podium.loss.objective.traits import Average
from podium.records import Batch, PolicyLoss

MAX_LOG_RATIO = 20.0
"""exp(20) is large but finite in float32; a larger ratio carries no information."""

Low = Annotated[float, Field(ge=0, le=1)]
High = Annotated[float, Field(ge=0)]
Clip = Low | tuple[Low, High]
"""How far a ratio may be below and above 1, [low, high]; one number is both."""


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


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, clip: Clip) -> PolicyLoss:
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
