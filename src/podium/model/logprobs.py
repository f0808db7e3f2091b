"""Logprobs and entropy of chosen tokens, never with all logits of a large batch at the same time.

In: hidden states `[N, hidden]`, the LM head's weight `[vocabulary, hidden]` and one target id a row. Out: logprob and
entropy `[N]` in float32 of the distribution at a temperature. Rows are taken a chunk at a time and their logits
recomputed in the backward pass, but for those of the first rows, so memory does not grow with the vocabulary times the
tokens. The entropy carries no gradient.
"""

import torch

from podium.model.fused import fused_on_cuda

MAX_CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Logits that are computed at one time, in float32: 64 MB and 512 MB."""
KEPT_CHUNKS = {"cpu": 4, "cuda": 0}
"""Whose logits the backward pass finds where the forward pass left them: all of a small batch, as CPUs get."""


def logits_of(hidden: torch.Tensor, weight: torch.Tensor, softcap: float | None = None) -> torch.Tensor:
    """Logits in float32 (float64 for a float64 model); trainer and engines use this, so that they round alike, but for
    an engine's packed head on a CPU."""
    if hidden.is_cuda and hidden.dtype == torch.bfloat16:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)  # rounding logits to bfloat16 costs 2 digits
    else:
        exact = _exact(hidden.dtype)
        logits = hidden.to(exact) @ weight.to(exact).t()
    return capped(logits, softcap)


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
    keeps = torch.is_grad_enabled()  # inside it is off
    return _ChunkedLogprobs.apply(hidden, weight, targets, temperature, softcap, keeps)  # type: ignore[return-value]


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, softcap, keeps):
        cast = weight.to(hidden.dtype)
        kept, chunks = [], []
        for part, target in _chunks(weight, hidden, targets):
            logits = logits_of(part, cast, softcap)
            chunks.append(_statistics(logits, target, temperature))
            if keeps and len(kept) < KEPT_CHUNKS[weight.device.type]:
                kept.append(logits)
        logprobs, entropy, normalisers = (torch.cat(values) for values in zip(*chunks, strict=True))
        ctx.save_for_backward(hidden, weight, targets, normalisers)
        ctx.kept = kept  # not among the saved tensors: what those take for a token would be counted for every token
        ctx.temperature, ctx.softcap = temperature, softcap
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, *gradients):
        hidden, weight, targets, normalisers = ctx.saved_tensors
        cast = weight.to(hidden.dtype)
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight, dtype=_exact(weight.dtype)) if ctx.needs_input_grad[1] else None
        start = 0
        for part, target, normaliser, gradient in _chunks(weight, hidden, targets, normalisers, gradients[0]):
            logits = ctx.kept.pop(0) if ctx.kept else logits_of(part, cast, ctx.softcap)
            of_logits = _logit_gradient(logits, target, normaliser, gradient, ctx.temperature, ctx.softcap)
            of_logits = of_logits.to(cast.dtype)
            hidden_gradient[start : start + len(part)] = of_logits @ cast
            if weight_gradient is not None:
                _add_product(weight_gradient, of_logits.t(), part)
            start += len(part)
        return (
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None,
            None,
            None,
            None,
        )


@fused_on_cuda
def _statistics(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprob, entropy, logsumexp) of each row."""
    logits = logits / temperature
    normaliser = logits.logsumexp(-1)
    probabilities = (logits - normaliser[:, None]).exp()
    entropy = normaliser - (probabilities * logits).sum(-1)
    return logits.gather(-1, targets[:, None])[:, 0] - normaliser, entropy, normaliser


@fused_on_cuda
def _logit_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    normaliser: torch.Tensor,
    gradient: torch.Tensor,
    temperature: float,
    softcap: float | None,
) -> torch.Tensor:
    """d logprob / d logits = one at the target − probability, times the gradient that arrives."""
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    made = is_target.to(logits.dtype) - (logits / temperature - normaliser[:, None]).exp()
    made = made * (gradient / temperature)[:, None]
    return made if softcap is None else made * (1 - (logits / softcap) ** 2)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, summed in float32 whatever the factors are."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        total += torch.mm(a, b, out_dtype=torch.float32)
    else:
        total += a @ b


def _exact(dtype: torch.dtype) -> torch.dtype:
    """That of sums: float32, or float64 where everything is."""
    return torch.promote_types(dtype, torch.float32)


def _chunks(weight: torch.Tensor, *tensors: torch.Tensor):
    rows = max(1, MAX_CHUNK_ELEMENTS[weight.device.type] // weight.shape[0])
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)
