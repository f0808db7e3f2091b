"""Small batches for tests of losses."""

from typing import Any

import torch

from podium.records import Batch


def a_batch(lengths: list[int], advantages: list[float], **others: Any) -> Batch:
    """Documents of 1 prompt token and `length` answer tokens each, with one advantage a document."""
    mask = torch.cat([torch.tensor([0.0] + [1.0] * length) for length in lengths])
    owners = torch.cat([torch.full((length + 1,), i) for i, length in enumerate(lengths)])
    starts = torch.tensor([0, *torch.tensor([length + 1 for length in lengths]).cumsum(0).tolist()], dtype=torch.int32)
    return Batch(
        token_ids=torch.zeros(len(mask), dtype=torch.long),
        position_ids=torch.cat([torch.arange(length + 1) for length in lengths]),
        document_ids=owners,
        cu_seqlens=starts,
        loss_mask=mask,
        advantages=torch.tensor(advantages)[owners] * mask,
        rollout_logprobs=others.pop("rollout_logprobs", torch.zeros(len(mask))),
        temperature=1.0,
        num_loss_tokens=sum(lengths),
        num_rollouts=len(lengths),
        answer_starts=(1,) * len(lengths),
        digests=("",) * len(lengths),
        **others,
    )
