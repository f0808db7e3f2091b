"""The CUDA kernel behind `logprobs`: one program per row of logits, which reads the row once or twice.

The first pass computes the softmax's statistics: each lane keeps its own maximum and sums, which are combined at the
end of the row. The second pass computes the gradient of the target's logprob, if needed; it runs backwards, because the
end of the row is still in the cache.
"""

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 4096
NUM_WARPS = 8


@triton.jit(do_not_specialize_on_alignment=["targets", "logprobs", "entropies"])  # avoids one compilation per alignment
def _softmax_rows(
    logits, targets, logprobs, entropies, gradients,
    width, inverse_temperature, inverse_softcap,
    WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    target = tl.load(targets + row)
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -1e30, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        is_there = first + lanes < width
        scaled = tl.load(logits + first + lanes, mask=is_there, other=0.0) * inverse_temperature
        higher = tl.maximum(top, tl.where(is_there, scaled, -1e30))
        shrink = tl.exp(top - higher)
        weight = tl.where(is_there, tl.exp(scaled - higher), 0.0)
        moment = (moment + mass * (top - higher)) * shrink + weight * (scaled - higher)
        mass = mass * shrink + weight
        top = higher
    highest = tl.max(top, 0)
    shrink = tl.exp(top - highest)
    total = tl.sum(mass * shrink, 0)
    below = tl.sum((moment + mass * (top - highest)) * shrink, 0)  # how far logits lie from the highest, weighted
    normaliser = highest + tl.log(total)
    chosen = tl.load(logits + target) * inverse_temperature
    tl.store(logprobs + row, chosen - normaliser)
    tl.store(entropies + row, tl.log(total) - below / total)  # type: ignore[operator]
    if WITH_GRADIENT:
        gradients += row * width
        last = (tl.cdiv(width, BLOCK) - 1) * BLOCK
        for step in range(0, width, BLOCK):
            columns = last - step + lanes
            is_there = columns < width
            value = tl.load(logits + columns, mask=is_there, other=0.0)
            share = tl.exp(value * inverse_temperature - normaliser)
            made = (tl.where(columns == target, 1.0, 0.0) - share) * inverse_temperature
            made *= 1.0 - (value * inverse_softcap) * (value * inverse_softcap)
            tl.store(gradients + columns, made.to(gradients.dtype.element_ty), mask=is_there)


def softmax_rows(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, softcap: float | None, into: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprob, entropy) of each row of float32 `logits`; d logprob / d logits is written to `into`."""
    rows, width = logits.shape
    logprobs, entropies = torch.empty(2, rows, device=logits.device)
    kernel: Any = _softmax_rows
    kernel[(rows,)](
        logits, targets, logprobs, entropies, into, width, 1.0 / temperature, 0.0 if softcap is None else 1.0 / softcap,
        WITH_GRADIENT=into is not None, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    return logprobs, entropies
