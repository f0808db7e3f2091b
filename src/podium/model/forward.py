"""The policy's logprobs on a packed batch.

In: a causal language model of transformers and a batch. Out: logprob and entropy of each loss token, flat `[T]`, 0
elsewhere. Only the loss tokens go through the LM head.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from podium.errors import InputError
from podium.model.logprobs import token_logprobs
from podium.model.packed_row import PackedRow, row_of
from podium.records import Batch


@dataclass(frozen=True)
class PlacedBatch:
    """A batch on the model's device, and the row that goes through the model."""

    batch: Batch
    row: PackedRow

    def with_fields(self, **changes: torch.Tensor) -> "PlacedBatch":
        """The same with other tensors in the batch; the row does not depend on these."""
        return PlacedBatch(replace(self.batch, **changes), self.row)


def place(batch: Batch, device: torch.device, *, shared_prefix: bool = False) -> PlacedBatch:
    """Moves a batch from the CPU to the device, with its row."""
    return to_device(PlacedBatch(batch, row_of(batch, shared_prefix=shared_prefix)), device)


def policy_logprobs(
    model: PreTrainedModel, placed: PlacedBatch, compute_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs, entropies) at the batch's temperature; the logprob of token t comes from the state at t − 1.

    `compute_dtype` is the dtype of the matrix products if it differs from the weights'; logits and what follows are
    float32.
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
    """Logprobs of all tokens except each document's first, at temperature 1, packed into one row."""
    placed = place(batch_of(*documents), head_weight(model).device)
    logprobs = policy_logprobs(model, placed, compute_dtype)[0]
    return logprobs[placed.row.loss_places].tolist()


def batch_of(*documents: list[int]) -> Batch:
    """A batch for scoring only: each document's first token is its prompt."""
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
    """The bound on the final logits, if the architecture has one."""
    return getattr(text_config(model.config), "final_logit_softcapping", None)


def text_config(config: Any) -> Any:
    """The config of the language model inside a multimodal model, or the config itself."""
    return config.get_text_config(decoder=True)


def max_context_tokens(config: Any) -> int:
    """The context of the language model, limited to the range of one set of rotary frequencies.

    "longrope" and "dynamic" choose the frequencies by the longest position in the input. Beyond that range a document's
    logprobs would depend on what is packed with it, and a sampled token on how long the answer becomes.
    """
    inner = text_config(config)
    longest = int(getattr(inner, "max_position_embeddings", None) or 4096)
    given = getattr(inner, "rope_parameters", None) or {}
    ropes = [given, *(rope for rope in given.values() if isinstance(rope, Mapping))]  # some have one per layer type
    limits = [
        int(rope.get("original_max_position_embeddings") or longest)
        for rope in ropes
        if rope.get("rope_type") == "longrope"
    ]
    return min([longest, *limits])


R = TypeVar("R")

ALIGNMENT = 16
"""In elements: every tensor starts where a kernel may load whole words."""


def to_device(record: R, device: torch.device) -> R:
    """The same dataclass with its tensors on `device`, including those of nested dataclasses.

    All tensors of a dtype move in one transfer: separate transfers cost more than their bytes. A batch's `cu_seqlens`
    stays on the CPU, where documents are counted and split.
    """
    if device.type == "cpu":
        return record
    tensors: dict[int, torch.Tensor] = {}
    _collect(record, tensors)
    moved: dict[int, torch.Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors.values()}:
        some = {key: tensor for key, tensor in tensors.items() if tensor.dtype == dtype}
        flat = torch.cat([_padded(tensor) for tensor in some.values()]).to(device)
        pieces = flat.split([len(_padded(tensor)) for tensor in some.values()])
        moved |= {key: p[: t.numel()].view(t.shape) for (key, t), p in zip(some.items(), pieces, strict=True)}
    return _rebuilt(record, moved)


def _collect(value: Any, tensors: dict[int, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        tensors[id(value)] = value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name != "cu_seqlens":
                _collect(getattr(value, field.name), tensors)
    elif isinstance(value, tuple):
        for each in value:
            _collect(each, tensors)


def _rebuilt(value: Any, moved: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return moved.get(id(value), value)
    if isinstance(value, tuple):
        return tuple(_rebuilt(each, moved) for each in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {field.name: _rebuilt(getattr(value, field.name), moved) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **fields)


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -len(flat) % ALIGNMENT))
