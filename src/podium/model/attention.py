"""Attention for packed rows, registered with transformers under the name "podium".

In: queries, keys and values of one row `[1, heads, T, head_dim]` that holds several documents, and where they start.
Out: what each document would give alone: by torch's variable-length kernel for half precision on CUDA, else by way of
a padded table. Without documents (an engine's prefill and decode) it is plain SDPA. transformers makes no mask for an
attention that it does not know, so none of size `[T, T]` ever exists.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from podium.errors import InputError
from podium.records import Batch

NAME = "podium"


@dataclass(frozen=True)
class Documents:
    """Where each token of a packed row goes in a padded `[documents, longest]` table."""

    count: int
    longest: int
    places: torch.Tensor
    """int64 `[T]`, the token's place in the flattened table."""
    starts: torch.Tensor
    """int32 `[documents + 1]` on the tokens' device."""

    @classmethod
    def of(cls, batch: Batch) -> "Documents":
        longest = batch.max_document_tokens
        places = batch.document_ids * longest + batch.position_ids
        return cls(batch.num_documents, longest, places, batch.cu_seqlens.to(places.device))


def packed_attention(module, query, key, value, attention_mask, documents: Documents | None = None, **kwargs):
    """transformers' attention interface: returns `[batch, T, heads, head_dim]` and no weights."""
    window = kwargs.pop("sliding_window", None)
    if kwargs.get("softcap") is not None:
        raise InputError(
            "this model soft-caps its attention scores, which Podium's attention does not do; use another model"
        )
    if documents is not None and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _by_kernel(module, query, key, value, documents, window, kwargs["scaling"]), None
    if documents is not None:
        return _by_document(module, query, key, value, documents, window, kwargs["scaling"]), None
    if window is not None and key.shape[2] > window:
        attention_mask = _within_window(attention_mask, query, key, window)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _by_kernel(module, query, key, value, documents: Documents, window: int | None, scaling: float) -> torch.Tensor:
    """No padding at all. The kernel wants as many key heads as query heads (torch 2.11 has no other form)."""
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    span = (-1 if window is None else window - 1, 0)  # keys to the left and to the right of a query
    out = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        documents.starts,
        documents.starts,
        documents.longest,
        documents.longest,
        scale=scaling,
        window_size=span,
    )
    return out.unsqueeze(0)  # type: ignore[union-attr]


def _by_document(module, query, key, value, documents: Documents, window: int | None, scaling: float) -> torch.Tensor:
    """Unpacks to one padded row a document (padding last, so the causal mask hides it), attends, packs again."""

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        tokens = packed[0].transpose(0, 1)  # [T, heads, head_dim]
        table = tokens.new_zeros(documents.count * documents.longest, *tokens.shape[1:])
        table = table.index_copy(0, documents.places, tokens)
        return table.view(documents.count, documents.longest, *tokens.shape[1:]).transpose(1, 2)

    mask = None
    if window is not None and documents.longest > window:
        columns = torch.arange(documents.longest, device=query.device)
        distance = columns[:, None] - columns[None, :]
        mask = (distance >= 0) & (distance < window)
    out = scaled_dot_product_attention(
        unpack(query), unpack(key), unpack(value), mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    table = out.transpose(1, 2).reshape(documents.count * documents.longest, *out.shape[1::2])
    return table.index_select(0, documents.places).unsqueeze(0)


def _within_window(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, window: int) -> torch.Tensor:
    """A decode or prefill mask narrowed to the last `window` keys. Each row's keys stand in order of position."""
    columns = torch.arange(key.shape[2], device=key.device)
    if query.shape[2] == 1 and mask is not None:
        newest = mask.long().sum(-1, keepdim=True)  # keys in use, the newest included
        return mask & (columns >= newest - window)
    rows = torch.arange(query.shape[2], device=key.device)[:, None]
    near = (rows - columns < window) & (columns <= rows)
    return near if mask is None else mask & near


AttentionInterface.register(NAME, packed_attention)
