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
    model: PreTrainedModel, token_ids: list[int], compute_dtype: torch.dtype | None = None
) -> list[float]:
    """Logprobs of `token_ids[1:]` at temperature 1, as one document."""
    device = head_weight(model).device
    length = len(token_ids)
    batch = Batch(
        token_ids=torch.tensor(token_ids, device=device),
        position_ids=torch.arange(length, device=device),
        document_ids=torch.zeros(length, dtype=torch.long, device=device),
        cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
        loss_mask=torch.tensor([0.0] + [1.0] * (length - 1), device=device),
        advantages=torch.zeros(length, device=device),
        rollout_logprobs=torch.zeros(length, device=device),
        temperature=1.0,
        num_loss_tokens=length - 1,
        num_rollouts=1,
        answer_starts=(1,),
        digests=("",),
    )
    return policy_logprobs(model, batch, compute_dtype)[0][1:].tolist()


def head_weight(model: PreTrainedModel) -> torch.Tensor:
    """`[vocabulary, hidden]`"""
    return model.get_output_embeddings().weight  # type: ignore[union-attr,return-value]


def softcap(model: PreTrainedModel) -> float | None:
    """Bound of the final logits, where the architecture has one."""
    return getattr(model.config, "final_logit_softcapping", None)
