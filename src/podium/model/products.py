"""Matrix products whose sums stay as they are.

In autocast a product of bfloat16 factors is summed in float32 and then rounded to bfloat16. Where the sum goes on in
float32 the rounding gains nothing and costs digits, by which sampler and trainer then differ: for logits, for gradients
of float32 weights, and for what attention and the MLP add to the residual stream. Inside the MLP it saves memory and
time; `model.exact_sums = "mlp"` does without it there too.
"""

from collections.abc import Mapping
from typing import Literal, TypeGuard

import torch
from transformers import PreTrainedModel

ExactSums = Literal["residual", "mlp"]
EXACT_NAMES: Mapping[ExactSums, frozenset[str]] = {
    "residual": frozenset({"o_proj", "down_proj"}),
    "mlp": frozenset({"o_proj", "down_proj", "gate_proj", "up_proj"}),
}
"""What layers are called in Llama, Qwen, Gemma, Mistral and their kin: those that write to the residual stream, and
with them those inside the MLP."""


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """That of sums: float32, or float64 where everything is."""
    return torch.promote_types(dtype, torch.float32)


def exact_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b `[n, k] x [k, m]`, in the precision of its sums."""
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
    """In autocast: factors rounded as everywhere, their sum and the bias left in float32. Else a plain linear layer."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return torch.nn.functional.linear(x, weight, bias)  # by its full name: DeepSpeed puts its own there
    product = _Product.apply(x.to(torch.get_autocast_dtype(kind)), weight)
    return product if bias is None else product + bias  # type: ignore[return-value,operator]


class _Product(torch.autograd.Function):
    """Gradients are rounded to the factors' precision first, as autocast does it; that of the weight is not again."""

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
    """Whether it is torch's or ours and no library's: those that quantise weights make subclasses."""
    return type(layer) in (torch.nn.Linear, ExactLinear)


def keep_exact_sums(model: PreTrainedModel, of: ExactSums = "residual") -> set[str]:
    """Leaves the sums of these layers unrounded where weights are float32; returns which of the names there are.

    Each layer keeps its place, its name and its weights.
    """
    found = set()
    for path, layer in model.named_modules():
        name = path.rpartition(".")[2]
        if name in EXACT_NAMES[of] and type(layer) is torch.nn.Linear and layer.weight.dtype == torch.float32:
            layer.__class__ = ExactLinear
            found.add(name)
    return found
