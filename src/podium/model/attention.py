"""Packed rows: how a batch becomes one row of tokens for the model, and the attention that keeps its documents apart.

Plain: the batch's own tokens. With shared prefixes, a prompt occurs once, before all answers of its group in the batch
(G·(P + R) tokens become P + G·R). Every answer still attends to its prompt's keys and values, and the logprob of its
first token comes from the prompt's last state. The results are the same, so no other code knows the difference.

Attention is registered with transformers as "podium": torch's variable-length kernel for half precision on CUDA, else
padded tables. Without segments (an engine's prefill and decode) it is plain SDPA. transformers makes no mask for an
attention that it does not know, so a mask of size `[L, L]` never exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from podium.errors import InputError
from podium.records import Batch

NAME = "podium"


@dataclass(frozen=True)
class SharedKeys:
    """Where each segment's keys come from, if several segments attend to the same prompt. K keys, L tokens."""

    places: torch.Tensor
    """int64 `[K]`, the token of the row that each key belongs to."""
    own: torch.Tensor
    """int64 `[L]`, the index of each token's key in its own segment."""
    prompt_tokens: torch.Tensor
    """int64 `[M]`, the tokens of shared prompts."""
    copies: torch.Tensor
    """int64 `[M, answers]`, the keys of each prompt token in the segments of its answers; K if there is none."""


@dataclass(frozen=True)
class Table:
    """Segments of similar length, one per padded row: for attention without a kernel for packed rows."""

    count: int
    longest_query: int
    longest_key: int
    queries: torch.Tensor
    """int64, the row's tokens that are in the table."""
    query_places: torch.Tensor
    """int64, their places in a flattened `[count, longest_query]` table."""
    keys: torch.Tensor
    """int64, the keys that are in the table."""
    key_places: torch.Tensor
    """int64, their places in a flattened `[count, longest_key]` table."""
    keys_before: torch.Tensor
    """int64 `[count]`, number of keys of each segment before its first query."""


@dataclass(frozen=True)
class Segments:
    """Which keys a token may attend to. A segment's last query is at its last key, the query before it at the key
    before that, and so on."""

    query_starts: torch.Tensor
    """int32 `[S + 1]`"""
    key_starts: torch.Tensor
    """int32 `[S + 1]`"""
    longest_query: int
    longest_key: int
    tables: tuple[Table, ...]
    """The same segments by length: one table for those longer than half of the longest, one for those longer than half
    of that, …"""
    shared: SharedKeys | None = None
    """None: a segment's keys are its own tokens, K = L."""

    @classmethod
    def of(cls, query_lengths: np.ndarray, key_lengths: np.ndarray, shared: SharedKeys | None) -> Segments:
        query_starts, key_starts = _starts(query_lengths), _starts(key_lengths)
        sizes = np.log2(key_lengths.max() / key_lengths).astype(int)  # 0 for the longest ones
        members = [np.flatnonzero(sizes == size) for size in np.unique(sizes)]
        return cls(
            query_starts=torch.from_numpy(query_starts.astype(np.int32)),
            key_starts=torch.from_numpy(key_starts.astype(np.int32)),
            longest_query=int(query_lengths.max()),
            longest_key=int(key_lengths.max()),
            tables=tuple(
                _table(query_starts[some], query_lengths[some], key_starts[some], key_lengths[some]) for some in members
            ),
            shared=shared,
        )


@dataclass(frozen=True)
class PackedRow:
    """L tokens for the decoder, and where to find the states of the batch's N loss tokens."""

    token_ids: torch.Tensor
    """int64 `[L]`"""
    position_ids: torch.Tensor
    """int64 `[L]`"""
    segments: Segments
    loss_places: torch.Tensor
    """int64 `[N]`, places of the loss tokens in the batch."""
    states: torch.Tensor
    """int64 `[N]`, for each loss token the token of the row before it."""


def row_of(batch: Batch, *, shared_prefix: bool = False) -> PackedRow:
    """Batch and row are both on the CPU."""
    places = batch.loss_mask.nonzero()[:, 0]
    if not shared_prefix:
        lengths = batch.cu_seqlens.diff().numpy()
        return PackedRow(batch.token_ids, batch.position_ids, Segments.of(lengths, lengths, None), places, places - 1)
    taken, row_of_token, segments = _shared_row(batch)
    return PackedRow(batch.token_ids[taken], batch.position_ids[taken], segments, places, row_of_token[places - 1])


def _shared_row(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, Segments]:
    """(the batch's token at each place of the row, the place of each token of the batch, the segments).

    One segment per prompt, then one per answer to it, run by run. A run is adjacent documents with the same prompt.
    """
    sizes = np.array([len(list(run)) for _, run in groupby(batch.ordinals)])
    firsts = _starts(sizes)[:-1]
    prompt_lengths = np.array(batch.answer_starts)[firsts]
    prompts = _starts(sizes + 1)[:-1]  # segments of prompts
    answers = np.setdiff1d(np.arange(sizes.sum() + len(sizes)), prompts)  # segments of answers
    prompt_of = np.repeat(prompts, sizes + 1)

    starts = batch.cu_seqlens.numpy().astype(np.int64)
    begins = np.empty(len(prompt_of), dtype=np.int64)  # where a segment's tokens are in the batch
    begins[prompts] = starts[firsts]
    begins[answers] = starts[:-1] + batch.answer_starts
    lengths = np.empty_like(begins)
    lengths[prompts], lengths[answers] = prompt_lengths, starts[1:] - begins[answers]
    before = np.zeros_like(begins)  # keys that a segment attends to before its own
    before[answers] = np.repeat(prompt_lengths, sizes)

    places, keys = _starts(lengths)[:-1], _starts(before + lengths)
    copies = np.full((len(sizes), sizes.max()), -1)
    copies[np.repeat(np.arange(len(sizes)), sizes), _ranges(np.zeros_like(sizes), sizes)] = keys[answers]
    copies = np.repeat(copies, prompt_lengths, axis=0)
    offsets = _ranges(np.zeros_like(prompt_lengths), prompt_lengths)[:, None]
    both = np.stack([places[prompt_of], places], 1), np.stack([before, lengths], 1)  # a segment's prompt, then itself
    shared = SharedKeys(
        places=torch.from_numpy(_ranges(both[0].ravel(), both[1].ravel())),
        own=torch.from_numpy(_ranges(keys[:-1] + before, lengths)),
        prompt_tokens=torch.from_numpy(_ranges(places[prompts], prompt_lengths)),
        copies=torch.from_numpy(np.where(copies < 0, keys[-1], copies + offsets)),
    )
    return (
        torch.from_numpy(_ranges(begins, lengths)),
        torch.from_numpy(_ranges(both[0][answers].ravel(), both[1][answers].ravel())),
        Segments.of(lengths, before + lengths, shared),
    )


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], lengths.cumsum()])


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """For each pair of start and length: start, start + 1, …, start + length − 1."""
    return np.arange(lengths.sum()) + np.repeat(starts - _starts(lengths)[:-1], lengths)


def _table(
    query_starts: np.ndarray, query_lengths: np.ndarray, key_starts: np.ndarray, key_lengths: np.ndarray
) -> Table:
    rows = np.arange(len(query_lengths))
    longest_query, longest_key = int(query_lengths.max()), int(key_lengths.max())
    return Table(
        count=len(rows),
        longest_query=longest_query,
        longest_key=longest_key,
        queries=torch.from_numpy(_ranges(query_starts, query_lengths)),
        query_places=torch.from_numpy(_ranges(rows * longest_query, query_lengths)),
        keys=torch.from_numpy(_ranges(key_starts, key_lengths)),
        key_places=torch.from_numpy(_ranges(rows * longest_key, key_lengths)),
        keys_before=torch.from_numpy(key_lengths - query_lengths),
    )


def packed_attention(module, query, key, value, attention_mask, segments: Segments | None = None, **kwargs):
    """transformers' attention interface: returns `[batch, L, heads, head_dim]` and no weights."""
    window = window_of(module, kwargs)
    kwargs.pop("sliding_window", None)
    if kwargs.get("softcap") is not None:
        raise InputError(
            "this model soft-caps its attention scores, which Podium's attention does not support; use another model"
        )
    if segments is not None:
        device = query.device.type
        # Rotary embeddings leave queries and keys in float32, whatever autocast's dtype.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
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
