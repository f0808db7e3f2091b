"""The policy's logprobs on a packed batch.

In: a causal language model of transformers and a Batch. Out: logprob and entropy of each loss token, flat `[T]`, 0
elsewhere. Only the loss tokens go through the LM head.
"""

import torch
from transformers import PreTrainedModel

from podium.model.attention import Documents
from podium.model.logprobs import token_logprobs
from podium.records import Batch


def policy_logprobs(
    model: PreTrainedModel, batch: Batch, compute_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs, entropies) at the batch's temperature; the logprob of token t comes from the state at t − 1.

    `compute_dtype` is that of the matrix products where it is not the weights'; logits and what follows are float32.
    """
    device = batch.token_ids.device.type
    with torch.autocast(device, dtype=compute_dtype, enabled=compute_dtype is not None):
        hidden = model.get_decoder()(
            input_ids=batch.token_ids[None],
            position_ids=batch.position_ids[None],
            attention_mask=None,
            use_cache=False,
            documents=Documents.of(batch),
        ).last_hidden_state[0]
    if compute_dtype is not None:
        hidden = hidden.to(compute_dtype)
    places = batch.loss_mask.nonzero()[:, 0]
    chosen, entropy = token_logprobs(
        hidden[places - 1],
        head_weight(model),
        batch.token_ids[places],
        temperature=batch.temperature,
        softcap=softcap(model),
    )
    flat = torch.zeros_like(batch.loss_mask)
    return flat.index_copy(0, places, chosen), flat.index_copy(0, places, entropy)


@torch.no_grad()
def sequence_logprobs(
    model: PreTrainedModel, *documents: list[int], compute_dtype: torch.dtype | None = None
) -> list[float]:
    """Logprobs of each document's tokens but the first, at temperature 1, all packed into one row."""
    device = head_weight(model).device
    lengths = [len(ids) for ids in documents]
    masks = [[0.0] + [1.0] * (length - 1) for length in lengths]
    batch = Batch(
        token_ids=torch.tensor([i for ids in documents for i in ids], device=device),
        position_ids=torch.cat([torch.arange(length) for length in lengths]).to(device),
        document_ids=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device),
        cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32),
        loss_mask=torch.tensor([m for mask in masks for m in mask], device=device),
        advantages=torch.zeros(sum(lengths), device=device),
        rollout_logprobs=torch.zeros(sum(lengths), device=device),
        temperature=1.0,
        num_loss_tokens=sum(lengths) - len(lengths),
        num_rollouts=len(lengths),
        answer_starts=(1,) * len(lengths),
        digests=("",) * len(lengths),
    )
    logprobs = policy_logprobs(model, batch, compute_dtype)[0]
    return logprobs[batch.loss_mask.bool()].tolist()


def head_weight(model: PreTrainedModel) -> torch.Tensor:
    """`[vocabulary, hidden]`"""
    return model.get_output_embeddings().weight  # type: ignore[union-attr,return-value]


def softcap(model: PreTrainedModel) -> float | None:
    """Bound of the final logits, where the architecture has one."""
    return getattr(model.config, "final_logit_softcapping", None)
