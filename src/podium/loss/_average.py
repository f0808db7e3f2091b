"""Per-token losses to one number, always over the whole optimizer step.

A batch is a part of a step; each of these returns its share, so that shares add up over batches and ranks and the
result does not depend on how the step was split.
"""

import torch

from podium.loss._traits import Average
from podium.records import Batch


def average_loss(per_token: torch.Tensor, batch: Batch, average: Average, constant: int = 1) -> torch.Tensor:
    """This batch's share of the step's average; tokens outside the loss mask do not count."""
    masked = per_token * batch.loss_mask
    if average == "tokens":
        return masked.sum() / batch.num_loss_tokens
    if average == "constant":
        return masked.sum() / (batch.num_rollouts * constant)
    return (masked / tokens_per_document(batch)[batch.document_ids]).sum() / batch.num_rollouts


def tokens_per_document(batch: Batch) -> torch.Tensor:
    """float `[N]`, loss tokens of each document; at least 1, so that a masked-out document divides by no zero."""
    counts = torch.zeros(batch.num_documents, dtype=batch.loss_mask.dtype, device=batch.loss_mask.device)
    return counts.index_add(0, batch.document_ids, batch.loss_mask).clamp(min=1)
