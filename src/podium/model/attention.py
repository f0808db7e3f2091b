"""Attention for packed rows, registered with transformers under the name "podium".

In: queries, keys and values of one row `[1, heads, L, head_dim]` that holds several documents, and its segments. Out:
the attention of each document by itself, from torch's variable-length kernel for half precision on CUDA, else through
padded tables. Without segments (an engine's prefill and decode) it is plain SDPA. transformers makes no mask for an
attention that it does not know, so a mask of size `[L, L]` never exists.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from podium.errors import InputError
from podium.model.packed_row import Segments, SharedKeys, Table

NAME = "podium"


def packed_attention(module, query, key, value, attention_mask, segments: Segments | None = None, **kwargs):
    """transformers' attention interface: returns `[batch, L, heads, head_dim]` and no weights."""
    window = window_of(module, kwargs)
    kwargs.pop("sliding_window", None)
    if kwargs.get("softcap") is not None:
        raise InputError(
            "this model soft-caps its attention scores, which Podium's attention does not support; use another model"
        )
    if segments is not None:
        dtype = _product_dtype(query)
        q, k, v = (tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))  # [tokens, heads, head_dim]
        if segments.shared is not None:
            k, v = keys_of_segments(k, segments.shared), keys_of_segments(v, segments.shared)
        is_half_on_cuda = query.is_cuda and dtype in (torch.bfloat16, torch.float16)
        attend = _by_kernel if is_half_on_cuda else _by_table
        return attend(q, k, v, segments, window, kwargs["scaling"]).unsqueeze(0), None
    if window is not None and key.shape[2] > window:
        attention_mask = _within_window(attention_mask, query, key, window)
    if query.shape[2] == 1 and attention_mask is not None:
        return _one_query_a_row(query, key, value, attention_mask, kwargs["scaling"]), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def window_of(module: Any, kwargs: Mapping[str, Any]) -> int | None:
    """How many keys a query of this layer may attend to, including its own; None: all before it.

    Most architectures pass the window as an argument. Some only put it into the mask, which is not made here; then it
    is read from the config, by the layer's type if layers have types.
    """
    if "sliding_window" in kwargs:
        return kwargs["sliding_window"] or None
    config = getattr(module, "config", None)
    types, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if types is not None and layer is not None and types[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None) or None


def _one_query_a_row(query, key, value, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    """A decode step: the query heads that share a key head become its queries, so no key is copied per query head."""
    rows, heads, _, dim = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], dim)
    out = scaled_dot_product_attention(grouped, key, value, mask, scale=scaling)
    return out.reshape(rows, 1, heads, -1)


def _product_dtype(query: torch.Tensor) -> torch.dtype:
    """The dtype of autocast if it is on: rotary embeddings leave queries and keys in float32."""
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype


def keys_of_segments(tokens: torch.Tensor, shared: SharedKeys) -> torch.Tensor:
    """Keys or values of the row's tokens `[L, heads, head_dim]` → of all segments `[K, heads, head_dim]`."""
    return _TakeKeys.apply(tokens, shared.places, shared.own, shared.prompt_tokens, shared.copies)  # type: ignore[return-value]


class _TakeKeys(torch.autograd.Function):
    """An index_select whose backward adds up a prompt token's copies in a fixed order, without atomic additions."""

    @staticmethod
    def forward(ctx, tokens, places, own, prompt_tokens, copies):
        ctx.save_for_backward(own, prompt_tokens, copies)
        return tokens.index_select(0, places)

    @staticmethod
    def backward(ctx, *gradients):
        own, prompt_tokens, copies = ctx.saved_tensors
        gradient = gradients[0]
        of_tokens = gradient.index_select(0, own)
        with_nothing = torch.cat([gradient, torch.zeros_like(gradient[:1])])
        of_prompts = with_nothing[copies].sum(1) + of_tokens.index_select(0, prompt_tokens)
        return of_tokens.index_copy(0, prompt_tokens, of_prompts), None, None, None, None


def _by_kernel(q, k, v, segments: Segments, window: int | None, scaling: float) -> torch.Tensor:
    """No padding at all. The kernel needs as many key heads as query heads (torch 2.11 has no other form)."""
    from torch.nn.attention.varlen import varlen_attn

    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    width = v.shape[-1]
    if width < k.shape[-1]:  # the kernel needs equal widths
        v = torch.nn.functional.pad(v, (0, k.shape[-1] - width))
    out = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        segments.query_starts,
        segments.key_starts,
        segments.longest_query,
        segments.longest_key,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),  # keys to the left and to the right of a query
    )
    return out[..., :width]  # type: ignore[index]


def _by_table(q, k, v, segments: Segments, window: int | None, scaling: float) -> torch.Tensor:
    """Puts segments of similar length into padded tables and runs plain attention on each table."""
    if len(segments.tables) == 1:
        return _attend(q, k, v, segments.tables[0], segments.shared is not None, window, scaling)
    parts = [
        _attend(
            q.index_select(0, table.queries),
            k.index_select(0, table.keys),
            v.index_select(0, table.keys),
            table,
            segments.shared is not None,
            window,
            scaling,
        )
        for table in segments.tables
    ]
    made = q.new_empty(*q.shape[:-1], v.shape[-1])  # values may be narrower than keys
    return made.index_copy(0, torch.cat([table.queries for table in segments.tables]), torch.cat(parts))


def _attend(q, k, v, table: Table, is_shared: bool, window: int | None, scaling: float) -> torch.Tensor:
    """One padded row per segment; the padding comes last, so the causal mask hides it."""
    mask = None
    if is_shared or (window is not None and table.longest_key > window):
        rows = torch.arange(table.longest_query, device=q.device)[None, :, None]
        columns = torch.arange(table.longest_key, device=q.device)
        distance = rows + table.keys_before[:, None, None] - columns
        mask = ((distance >= 0) & (distance < (window or table.longest_key)))[:, None]
    out = scaled_dot_product_attention(
        _padded(q, table.query_places, table.longest_query, table.count),
        _padded(k, table.key_places, table.longest_key, table.count),
        _padded(v, table.key_places, table.longest_key, table.count),
        mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=True,
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, table.query_places)


def _padded(tokens: torch.Tensor, places: torch.Tensor, longest: int, count: int) -> torch.Tensor:
    """`[tokens, heads, head_dim]` → `[segments, heads, longest, head_dim]`, padded with zeros."""
    table = tokens.new_zeros(count * longest, *tokens.shape[1:]).index_copy(0, places, tokens)
    return table.view(count, longest, *tokens.shape[1:]).transpose(1, 2)


def _within_window(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, window: int) -> torch.Tensor:
    """A decode or prefill mask narrowed to the last `window` keys. Each row's keys are in order of position."""
    columns = torch.arange(key.shape[2], device=key.device)
    if query.shape[2] == 1 and mask is not None:
        newest = mask.long().sum(-1, keepdim=True)  # keys in use, the newest included
        return mask & (columns >= newest - window)
    rows = torch.arange(query.shape[2], device=key.device)[:, None]
    near = (rows - columns < window) & (columns <= rows)
    return near if mask is None else mask & near


AttentionInterface.register(NAME, packed_attention)
