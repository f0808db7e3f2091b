"""Logprobs and entropy of chosen tokens without a `[tokens, vocabulary]` tensor, forward or backward.

In: hidden states `[N, hidden]`, the LM head's weight `[vocabulary, hidden]` and one target id a row. Out: logprob and
entropy `[N]` in float32 of the distribution at a temperature. Rows are taken a chunk at a time and their logits
recomputed in the backward pass, so memory does not grow with the vocabulary times the tokens. The entropy carries no
gradient.
"""

import torch

MAX_CHUNK_ELEMENTS = 1 << 24
"""Logits that exist at one time: 64 MB in float32."""


def logits_of(hidden: torch.Tensor, weight: torch.Tensor, softcap: float | None = None) -> torch.Tensor:
    """Float32 logits; engine and trainer both use this, so that they round alike."""
    if hidden.is_cuda and hidden.dtype == torch.bfloat16:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)  # rounding logits to bfloat16 costs 2 digits
    else:
        logits = hidden.float() @ weight.float().t()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprob, entropy) of each row's target."""
    weight = weight.to(hidden.dtype)
    return _ChunkedLogprobs.apply(hidden, weight, targets, temperature, softcap)  # type: ignore[return-value]


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, softcap):
        logprobs, entropies, normalisers = [], [], []
        for part, target in _chunks(weight, hidden, targets):
            logits = logits_of(part, weight, softcap) / temperature
            normaliser = logits.logsumexp(-1)
            logprobs.append(logits.gather(-1, target[:, None])[:, 0] - normaliser)
            probabilities = (logits - normaliser[:, None]).exp()
            entropies.append(normaliser - (probabilities * logits).sum(-1))
            normalisers.append(normaliser)
        ctx.save_for_backward(hidden, weight, targets, torch.cat(normalisers))
        ctx.temperature, ctx.softcap = temperature, softcap
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx, *gradients):
        hidden, weight, targets, normalisers = ctx.saved_tensors
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        start = 0
        for part, target, normaliser, gradient in _chunks(weight, hidden, targets, normalisers, gradients[0]):
            logits = logits_of(part, weight, ctx.softcap)
            of_logits = -(logits / ctx.temperature - normaliser[:, None]).exp()  # d logprob = onehot − probability
            of_logits.scatter_add_(1, target[:, None], torch.ones_like(of_logits[:, :1]))
            of_logits *= (gradient / ctx.temperature)[:, None]
            if ctx.softcap is not None:
                of_logits *= 1 - (logits / ctx.softcap) ** 2
            of_logits = of_logits.to(weight.dtype)
            hidden_gradient[start : start + len(part)] = of_logits @ weight
            if weight_gradient is not None:
                weight_gradient += (of_logits.t() @ part).float()
            start += len(part)
        return hidden_gradient, None if weight_gradient is None else weight_gradient.to(weight.dtype), None, None, None


def _chunks(weight: torch.Tensor, *tensors: torch.Tensor):
    rows = max(1, MAX_CHUNK_ELEMENTS // weight.shape[0])
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)
