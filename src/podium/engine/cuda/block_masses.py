"""The CUDA kernel with which a token's drawing begins: the mass of each block of ids, the logits read once."""

from typing import Any

import torch
import triton
import triton.language as tl

from podium.engine.decoding.sampling import BLOCK_WIDTH

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
