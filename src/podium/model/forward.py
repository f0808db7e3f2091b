"""The policy's logprobs on a packed batch.

In: a causal language model of transformers and a batch. Out: logprob and entropy of each loss token, flat `[T]`, 0
elsewhere. Only the loss tokens go through the LM head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from podium.errors import InputError
from podium.model.logprobs import token_logprobs
from podium.model.row import Row, row_of
from podium.model.transfer import to_device
from podium.records import Batch


@dataclass(frozen=True)
class Placed:
    """A batch on the model's device, with the row that goes through the model."""

    batch: Batch
    row: Row

    def with_fields(self, **changes: torch.Tensor) -> "Placed":
        """With other tensors in the batch; the row does not depend on them."""
        return Placed(replace(self.batch, **changes), self.row)


def place(batch: Batch, device: torch.device, *, shared_prefix: bool = False) -> Placed:
    """From a batch on the CPU."""
    return to_device(Placed(batch, row_of(batch, shared_prefix=shared_prefix)), device)


def policy_logprobs(
    model: PreTrainedModel, placed: Placed, compute_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs, entropies) at the batch's temperature; the logprob of token t comes from the state at t − 1.

    `compute_dtype` is that of the matrix products where it is not the weights'; logits and what follows are float32.
    """
    batch, row = placed.batch, placed.row
    with torch.autocast(row.token_ids.device.type, dtype=compute_dtype, enabled=compute_dtype is not None):
        hidden = decoder_states(
            model,
            input_ids=row.token_ids[None],
            position_ids=row.position_ids[None],
            attention_mask=None,
            use_cache=False,
            segments=row.segments,
        )[0]
    if compute_dtype is not None:
        hidden = hidden.to(compute_dtype)
    chosen, entropy = token_logprobs(
        hidden.index_select(0, row.states),
        head_weight(model),
        batch.token_ids.index_select(0, row.loss_places),
        temperature=batch.temperature,
        softcap=softcap(model),
    )
    flat = chosen.new_zeros(len(batch.token_ids))
    return flat.index_copy(0, row.loss_places, chosen), flat.index_copy(0, row.loss_places, entropy)


def decoder_states(model: PreTrainedModel, **inputs: Any) -> torch.Tensor:
    """The last layer's states `[rows, tokens, hidden]`, before the LM head."""
    made = model.get_decoder()(**inputs)
    if not hasattr(made, "last_hidden_state"):
        raise InputError(
            f"the decoder of a {type(model).__name__} gives no hidden states, so its logprobs cannot be computed; use "
            "another model"
        )
    return made.last_hidden_state


@torch.no_grad()
def sequence_logprobs(
    model: PreTrainedModel, *documents: list[int], compute_dtype: torch.dtype | None = None
) -> list[float]:
    """Logprobs of each document's tokens but the first, at temperature 1, all packed into one row."""
    placed = place(batch_of(*documents), head_weight(model).device)
    logprobs = policy_logprobs(model, placed, compute_dtype)[0]
    return logprobs[placed.row.loss_places].tolist()


def batch_of(*documents: list[int]) -> Batch:
    """Token ids as documents whose first token is the prompt, to be looked at and not trained."""
    lengths = torch.tensor([len(ids) for ids in documents])
    starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    total = int(starts[-1])
    mask = torch.ones(total)
    mask[starts[:-1]] = 0
    owners = torch.arange(len(documents)).repeat_interleave(lengths)
    return Batch(
        token_ids=torch.tensor([i for ids in documents for i in ids]),
        position_ids=torch.arange(total) - starts[owners],
        document_ids=owners,
        cu_seqlens=starts.int(),
        loss_mask=mask,
        advantages=torch.zeros(total),
        rollout_logprobs=torch.zeros(total),
        temperature=1.0,
        num_loss_tokens=total - len(documents),
        num_rollouts=len(documents),
        answer_starts=(1,) * len(documents),
        digests=("",) * len(documents),
    )


def head_weight(model: PreTrainedModel) -> torch.Tensor:
    """`[vocabulary, hidden]`"""
    return model.get_output_embeddings().weight  # type: ignore[union-attr,return-value]


def softcap(model: PreTrainedModel) -> float | None:
    """Bound of the final logits, where the architecture has one."""
    return getattr(text_config(model.config), "final_logit_softcapping", None)


def text_config(config: Any) -> Any:
    """Of the language model, where the model is a wrapper for pictures or sound around one."""
    return config.get_text_config(decoder=True)


def max_context_tokens(config: Any) -> int:
    """Of the language model inside; no longer than one set of rotary frequencies reaches.

    "longrope" and "dynamic" choose them by the longest position at hand, so beyond that length a document's tokens
    would depend on what is packed with it, and a sampled token on how long the answer becomes.
    """
    inner = text_config(config)
    longest = int(getattr(inner, "max_position_embeddings", None) or 4096)
    given = getattr(inner, "rope_parameters", None) or {}
    ropes = [given, *(rope for rope in given.values() if isinstance(rope, Mapping))]  # some have one a layer type
    limits = [
        int(rope.get("original_max_position_embeddings") or longest)
        for rope in ropes
        if rope.get("rope_type") == "longrope"
    ]
    return min([longest, *limits])
