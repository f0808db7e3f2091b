"""The CUDA kernel of `add_branches`: a program per tile of the outputs, which are read and written once."""

from typing import Any

import torch
import triton
import triton.language as tl

TILE = 128
"""Most rows, and outputs, of a program."""
CHUNK = 64
"""Most inner columns of a product at a time: all of a large rank would not fit into a GPU's shared memory."""
LEAST_ROWS = 16
"""Of a matrix product in Triton; fewer rows are padded."""


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
    """See `podium.engine.cuda.branches`; `inner` is a power of 2 from 16 on."""
    rows, outputs = len(product), len(b)
    tile = min(TILE, max(LEAST_ROWS, triton.next_power_of_2(rows)))
    kernel: Any = _add_branches
    kernel[(triton.cdiv(outputs, TILE), triton.cdiv(rows, tile))](
        product, b, scale, rows, outputs, product.stride(0),
        INNER=b.shape[1], CHUNK=min(CHUNK, b.shape[1]), ROWS=tile, OUTPUTS=TILE,
        PRECISION="ieee" if b.dtype == torch.float32 else "tf32",
        num_warps=8 if tile == TILE else 4,
    )  # fmt: skip
