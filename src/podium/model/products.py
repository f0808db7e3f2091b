"""Matrix products whose sums are not rounded.

In autocast a product of bfloat16 factors is summed in float32 and then rounded to bfloat16. If the result is used in
float32, the rounding gains nothing and makes sampler and trainer differ: for logits, for gradients of float32 weights,
and for what attention and the MLP add to the residual stream. Inside the MLP, rounding saves memory and time.
"""

from typing import TypeGuard

import torch
from transformers import PreTrainedModel

EXACT_NAMES = frozenset({"o_proj", "down_proj"})
"""Layers that write to the residual stream, as Llama, Qwen, Gemma, Mistral and similar models call them. Exact sums in
gate_proj and up_proj too were measured on SmolLM2-135M: a sixth more time and 58 % more memory per step."""


def products_dtype(precision: str | None, weights: torch.dtype) -> torch.dtype | None:
    """The dtype of matrix products for `trainer.precision`, to which autocast rounds their factors; None: the weights'.

    Weights in bfloat16 are multiplied in bfloat16, with autocast too: the residual stream is then float32.
    """
    return torch.bfloat16 if precision == "bfloat16" or weights == torch.bfloat16 else None


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, or float64 if the factors are float64."""
    return torch.promote_types(dtype, torch.float32)


def exact_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, `[n, k] x [k, m]`, in the precision of its sums."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    exact = exact_dtype(a.dtype)
    with torch.autocast(a.device.type, enabled=False):
        return a.to(exact) @ b.to(exact)


class ExactLinear(torch.nn.Linear):
    """Computes `exact_linear`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return exact_linear(input, self.weight, self.bias)


def exact_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In autocast: factors are rounded as usual, their sum and the bias stay float32. Else a plain linear layer."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return torch.nn.functional.linear(x, weight, bias)  # by its full name, because DeepSpeed replaces it
    product = _Product.apply(x.to(torch.get_autocast_dtype(kind)), weight)
    return product if bias is None else product + bias  # type: ignore[return-value,operator]


class _Product(torch.autograd.Function):
    """Incoming gradients are rounded to the factors' precision, as in autocast; the weight's own gradient is not."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return exact_product(_rows(x), weight.to(x.dtype).t()).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx, *gradients):
        x, weight = ctx.saved_tensors
        arriving = _rows(gradients[0].to(x.dtype))
        of_x = (arriving @ weight.to(x.dtype)).view_as(x) if ctx.needs_input_grad[0] else None
        of_weight = exact_product(arriving.t(), _rows(x)).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return of_x, of_weight


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def is_plain_linear(layer: object) -> TypeGuard[torch.nn.Linear]:
    """Whether the layer is torch's or ours: libraries that quantise weights make subclasses."""
    return type(layer) in (torch.nn.Linear, ExactLinear)


class ExactEmbedding(torch.nn.Embedding):
    """In autocast the embeddings of bfloat16 weights are float32: the residual stream begins with them."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        found = super().forward(input)
        return found.float() if torch.is_autocast_enabled(found.device.type) else found


def keep_exact_sums(model: PreTrainedModel) -> None:
    """Keeps the residual stream in float32 where autocast is on: layers that write to it do not round their sums.

    Each layer keeps its place, its name and its weights.
    """
    for path, layer in model.named_modules():
        if path.rpartition(".")[2] in EXACT_NAMES and type(layer) is torch.nn.Linear:
            layer.__class__ = ExactLinear
    embeddings = model.get_input_embeddings()
    if type(embeddings) is torch.nn.Embedding and embeddings.weight.dtype == torch.bfloat16:
        embeddings.__class__ = ExactEmbedding
