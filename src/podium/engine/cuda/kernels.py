"""The CUDA kernels of a decode step, in Triton: attention, the beginning of a draw, the branches of adapted layers.

**Attention** (flash decoding) has a program per row and key head, which reads keys once, up to their end. All query
heads of a key head are one matrix, so grouped queries read the cache once. The softmax is accumulated block by block in
float32, first over the prompt, whose pages a group shares, then over the row's own pages, last over the row's new key,
which the program also writes into the row's last page: no other program looks there. A block lies in one page, so each
block costs one look into the table of pages.

**A draw** begins with the mass of each block of ids, for which the logits are read once.

**Branches** are added by a program per tile of the outputs, which are read and written once.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from podium.engine.cuda.roster import PAGE
from podium.engine.decoding.sampling import BLOCK_WIDTH

LEAST_ROWS = 16
"""Of a matrix product in Triton; fewer rows, or query heads, are padded."""
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


BLOCKS_A_PROGRAM = 4


@triton.jit
def _block_masses(
    logits, temperature, masses, vocabulary, num_blocks,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    columns = blocks[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    values = tl.load(logits + row * vocabulary + columns, mask=columns < vocabulary, other=float("-inf"))
    values /= tl.load(temperature + row)
    top = tl.max(values, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    mass = top + tl.log(tl.sum(tl.exp(values - top[:, None]), 1))
    tl.store(masses + row * num_blocks + blocks, mass, mask=blocks < num_blocks)


def block_masses_on_cuda(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """See `block_masses`; for contiguous float32 logits."""
    rows, vocabulary = logits.shape
    num_blocks = triton.cdiv(vocabulary, BLOCK_WIDTH)
    masses = torch.empty(rows, num_blocks, device=logits.device)
    kernel: Any = _block_masses
    kernel[(rows, triton.cdiv(num_blocks, BLOCKS_A_PROGRAM))](
        logits, temperature, masses, vocabulary, num_blocks, BLOCKS=BLOCKS_A_PROGRAM, WIDTH=BLOCK_WIDTH
    )
    return masses


TILE = 128
"""Most rows, and outputs, of a program that adds branches."""
CHUNK = 64
"""Most inner columns of a product at a time: all of a large rank would not fit into a GPU's shared memory."""


@triton.jit
def _add_branches(
    product, b, scale, num_rows, num_outputs, row_stride,
    INNER: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    begins = product + rows.to(tl.int64)[:, None] * row_stride
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in range(0, INNER, CHUNK):
        inner = first + tl.arange(0, CHUNK)
        x = tl.load(begins + num_outputs + inner[None, :], mask=is_row[:, None], other=0.0)
        halves = tl.load(b + outputs[:, None] * INNER + inner[None, :], mask=is_output[:, None], other=0.0)
        total += tl.dot(x.to(halves.dtype), tl.trans(halves), input_precision=PRECISION)
    branch = total.to(b.dtype.element_ty).to(tl.float32) * scale  # a product is rounded before it is scaled
    mask = is_row[:, None] & is_output[None, :]
    base = tl.load(begins + outputs[None, :], mask=mask, other=0.0)
    tl.store(begins + outputs[None, :], (base.to(tl.float32) + branch).to(base.dtype), mask=mask)


def add_branches_on_cuda(product: torch.Tensor, b: torch.Tensor, scale: float) -> None:
    """See `add_branches` in decoding/linear.py; `inner` is a power of 2 from 16 on."""
    rows, outputs = len(product), len(b)
    tile = min(TILE, max(LEAST_ROWS, triton.next_power_of_2(rows)))
    kernel: Any = _add_branches
    kernel[(triton.cdiv(outputs, TILE), triton.cdiv(rows, tile))](
        product, b, scale, rows, outputs, product.stride(0),
        INNER=b.shape[1], CHUNK=min(CHUNK, b.shape[1]), ROWS=tile, OUTPUTS=TILE,
        PRECISION="ieee" if b.dtype == torch.float32 else "tf32",
        num_warps=8 if tile == TILE else 4,
    )  # fmt: skip
