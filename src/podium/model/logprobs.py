"""Logprobs and entropy of chosen tokens, without holding all logits of a large batch at the same time.

In: hidden states `[N, hidden]`, the LM head's weight `[vocabulary, hidden]` and one target id per row. Out: logprob and
entropy `[N]` in float32 of the distribution at a temperature. Logits are computed one chunk of rows at a time. The
backward pass needs d logprob / d logits, which depends on nothing later, so the forward pass keeps it, in the precision
of the products, for as many rows as a limit allows; for the other rows logits are computed again. So memory does not
grow with vocabulary times tokens. The entropy carries no gradient.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._triton import has_triton

from podium.model.products import exact_dtype, exact_product

MAX_CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Logits per chunk, in float32: 64 MB and 512 MB."""
KEPT_BYTES_ON_CPU = 1 << 28
"""Most bytes of logit gradients that the forward pass keeps on a CPU."""
KEPT_SHARE_OF_GPU = 1 / 8
"""The same on a GPU, as a share of its memory."""


def kept_bytes(device: torch.device) -> int:
    """Most bytes of logit gradients that the forward pass keeps on this device."""
    if device.type == "cuda":
        return int(KEPT_SHARE_OF_GPU * torch.cuda.get_device_properties(device).total_memory)
    return KEPT_BYTES_ON_CPU


def logits_of(hidden: torch.Tensor, weight: torch.Tensor, softcap: float | None = None) -> torch.Tensor:
    """Logits in float32 (float64 for a float64 model). Trainer and engines share this function so that they round
    alike; only an engine's packed head on a CPU differs."""
    return capped(exact_product(hidden, weight.t()), softcap)


def capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprob, entropy) of each row's target. The products are in `hidden`'s precision, their sums in float32."""
    keeps = torch.is_grad_enabled()  # inside the Function it is always off
    return _ChunkedLogprobs.apply(hidden, weight, targets, temperature, softcap, keeps)  # type: ignore[return-value]


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, softcap, keeps):
        cast = weight.to(hidden.dtype)
        rows_at_a_time = _rows_at_a_time(weight)
        kept = hidden.new_empty(_num_kept(hidden, weight, rows_at_a_time) if keeps else 0, len(weight))
        made = []
        for start in range(0, max(1, len(hidden)), rows_at_a_time):  # one pass even if there are no rows
            rows = slice(start, start + rows_at_a_time)
            logits = logits_of(hidden[rows], cast, softcap)
            made.append(
                _softmax(logits, targets[rows], temperature, softcap, kept[rows] if start < len(kept) else None)
            )
        logprobs, entropy = (torch.cat(values) for values in zip(*made, strict=True))
        ctx.save_for_backward(hidden, weight, targets)
        ctx.kept = kept  # not a saved tensor: `model/memory.py` would count its bytes for every token
        ctx.temperature, ctx.softcap = temperature, softcap
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, *gradients):
        hidden, weight, targets = ctx.saved_tensors
        cast = weight.to(hidden.dtype)
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight, dtype=exact_dtype(weight.dtype)) if ctx.needs_input_grad[1] else None
        arriving = gradients[0][:, None]
        for rows, of_logits in _logit_gradients(ctx, hidden, cast, targets):
            hidden_gradient[rows] = (of_logits @ cast) * arriving[rows]
            if weight_gradient is not None:
                weight_gradient += exact_product(of_logits.t(), (hidden[rows] * arriving[rows]).to(hidden.dtype))
            del of_logits  # before the next chunk is made
        return (
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None,
            None,
            None,
            None,
        )


def _logit_gradients(
    ctx: Any, hidden: torch.Tensor, cast: torch.Tensor, targets: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
    """(rows, their d logprob / d logits): first the kept rows, whose memory is then released, then chunk by chunk."""
    kept, ctx.kept = ctx.kept, cast[:0]
    if len(kept):
        yield slice(0, len(kept)), kept
    rows_at_a_time, num_kept = _rows_at_a_time(cast), len(kept)
    del kept
    for start in range(num_kept, len(hidden), rows_at_a_time):
        rows = slice(start, start + rows_at_a_time)
        logits = logits_of(hidden[rows], cast, ctx.softcap)
        made = cast.new_empty(logits.shape)
        _softmax(logits, targets[rows], ctx.temperature, ctx.softcap, made)
        yield rows, made


def _softmax(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, softcap: float | None, into: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprob, entropy) of each row; writes d logprob / d logits = (one-hot target − probability) / T to `into`."""
    if logits.is_cuda and logits.dtype == torch.float32 and len(logits) and has_triton():
        from podium.model.softmax_kernel import softmax_rows  # needs Triton

        return softmax_rows(logits, targets, temperature, softcap, into)
    scaled = logits / temperature
    normaliser = scaled.logsumexp(-1)
    logprobs = scaled.gather(-1, targets[:, None])[:, 0] - normaliser
    probabilities = (scaled - normaliser[:, None]).exp_()
    entropy = normaliser - (probabilities * scaled).sum(-1)
    if into is not None:
        made = probabilities.neg_()
        made[torch.arange(len(made), device=made.device), targets] += 1
        made /= temperature
        into.copy_(made if softcap is None else made * (1 - (logits / softcap) ** 2))
    return logprobs, entropy


def _rows_at_a_time(weight: torch.Tensor) -> int:
    return max(1, MAX_CHUNK_ELEMENTS[weight.device.type] // len(weight))


def _num_kept(hidden: torch.Tensor, weight: torch.Tensor, rows_at_a_time: int) -> int:
    """Number of rows to keep: all, or whole chunks."""
    most = kept_bytes(weight.device) // (len(weight) * hidden.element_size())
    return len(hidden) if len(hidden) <= most else most // rows_at_a_time * rows_at_a_time
