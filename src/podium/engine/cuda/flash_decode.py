"""The CUDA kernel of decode attention (flash decoding): a program a row and key head, keys read once, up to their end.

All query heads of a key head are one matrix, so grouped queries read the cache once. The softmax is accumulated block
by block in float32, first over the prompt, whose pages a group shares, then over the row's own pages, last over the
row's new key, which the program also writes into the row's last page: no other program looks there. A block lies in one
page, so each block costs one look into the table of pages.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from podium.engine.cuda.pages import PAGE

LEAST_ROWS = 16
"""Of a matrix product in Triton; fewer query heads are padded."""
WIDE = 128
"""Dimensions of a head from which on the smallest programs are the fastest in half precision; measured on an H200."""


@triton.jit
def _take_keys(
    total, normaliser, top, query, keys, values, pages, begin, end, dims, scaling,
    DIM: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the keys of columns [begin, end) to a softmax under way (its total, normaliser and largest score). `pages`
    points to the numbers of the pages, of TOKENS columns each."""
    offsets = tl.arange(0, BLOCK)[:, None] * STRIDE + dims[None, :]
    for first in range((begin // BLOCK) * BLOCK, end, BLOCK):
        page = tl.load(pages + first // TOKENS).to(tl.int64)
        start = (page * TOKENS + first % TOKENS) * STRIDE  # type: ignore[operator]
        columns = first + tl.arange(0, BLOCK)
        is_there = (columns >= begin) & (columns < end)
        mask = is_there[:, None] & (dims < DIM)[None, :]
        block = tl.load(keys + start + offsets, mask=mask, other=0.0)
        scores = tl.dot(query, tl.trans(block), input_precision=PRECISION) * scaling
        scores = tl.where(is_there[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[:, None])
        block = tl.load(values + start + offsets, mask=mask, other=0.0)
        normaliser = normaliser * shrink + tl.sum(weights, 1)
        total = total * shrink[:, None] + tl.dot(weights.to(block.dtype), block, input_precision=PRECISION)
        top = higher
    return total, normaliser, top


@triton.jit
def _take_own(total, normaliser, top, query, key, value, scaling):
    """The same for one key, which every query sees."""
    scores = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scaling
    higher = tl.maximum(top, scores)
    shrink, weights = tl.exp2(top - higher), tl.exp2(scores - higher)
    total = total * shrink[:, None] + weights[:, None] * value.to(tl.float32)[None, :]
    return total, normaliser * shrink + weights


@triton.jit
def _flash_decode(
    query, key, value, keys, values, tables, slots, lengths, prompt_lengths, out,
    key_stride, value_stride, table_stride, scaling, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    length, prompt_length = tl.load(lengths + row).to(tl.int32), tl.load(prompt_lengths + row).to(tl.int32)
    prompt_pages = tables + tl.load(slots + row) * table_stride
    own_pages = prompt_pages + (prompt_length + TOKENS - 1) // TOKENS
    heads, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    places = (row * HEADS * GROUP + head * GROUP + heads)[:, None] * DIM + dims[None, :]
    mask = (heads < GROUP)[:, None] & (dims < DIM)[None, :]
    block = tl.load(query + places, mask=mask, other=0.0)
    scaling *= 1.4426950408889634  # powers of 2 below, not of e
    total = tl.zeros([ROWS, DIMS], tl.float32)
    normaliser = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], -1e30, tl.float32)
    oldest = 0
    if window > 0:
        oldest = tl.maximum(prompt_length + length - window + 1, 0)
    own_key = tl.load(key + row * key_stride + head * DIM + dims, mask=dims < DIM, other=0.0)
    own_value = tl.load(value + row * value_stride + head * DIM + dims, mask=dims < DIM, other=0.0)
    last_page = tl.load(own_pages + length // TOKENS).to(tl.int64)
    next_column = ((last_page * TOKENS + length % TOKENS) * HEADS + head) * DIM + dims
    tl.store(keys + next_column, own_key, mask=dims < DIM)
    tl.store(values + next_column, own_value, mask=dims < DIM)
    keys += head * DIM
    values += head * DIM
    total, normaliser, top = _take_keys(
        total, normaliser, top, block, keys, values, prompt_pages, oldest, prompt_length,
        dims, scaling, DIM, HEADS * DIM, BLOCK, TOKENS, PRECISION,
    )  # fmt: skip
    total, normaliser, top = _take_keys(
        total, normaliser, top, block, keys, values, own_pages, tl.maximum(oldest - prompt_length, 0), length,
        dims, scaling, DIM, HEADS * DIM, BLOCK, TOKENS, PRECISION,
    )  # fmt: skip
    total, normaliser = _take_own(total, normaliser, top, block, own_key, own_value, scaling)
    tl.store(out + places, (total / normaliser[:, None]).to(out.dtype.element_ty), mask=mask)


def flash_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    prompt_lengths: torch.Tensor,
    scaling: float,
    window: int,
) -> torch.Tensor:
    """See `decode_attention`."""
    rows, heads, dim = query.shape
    key_heads = keys.shape[2]
    group = heads // key_heads
    padded = max(LEAST_ROWS, triton.next_power_of_2(group))
    is_wide = query.element_size() == 2 and dim >= WIDE
    block, num_warps, num_stages = (32, padded // LEAST_ROWS, 3) if is_wide else (64, 4, 2)
    query = query.contiguous()
    key, value = (each if each.stride()[1:] == (dim, 1) else each.contiguous() for each in (key, value))
    out = torch.empty_like(query)
    kernel: Any = _flash_decode
    kernel[(rows, key_heads)](
        query, key, value, keys, values, tables, slots, lengths, prompt_lengths, out,
        key.stride(0), value.stride(0), tables.stride(0), scaling, window,
        HEADS=key_heads, GROUP=group, DIM=dim, ROWS=padded,
        DIMS=max(16, triton.next_power_of_2(dim)), BLOCK=block, TOKENS=PAGE,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out
