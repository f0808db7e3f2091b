"""torch.compile where it helps: on CUDA with Triton, for the decoder's layers and a few elementwise functions.

The results are those of the plain code; only the number of kernels and the memory traffic differ.
"""

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch.utils._triton import has_triton
from torch.utils.flop_counter import flop_registry, register_flop_formula
from transformers import PreTrainedModel

F = TypeVar("F", bound=Callable)

SAVED_SHARE = 0.7
"""Share of the possible activations that a layer keeps for its backward pass: the products and attention. The rest is
cheap and is recomputed."""


def fused_on_cuda(function: F) -> F:
    """The function, compiled on its first call with a CUDA tensor."""

    @functools.cache
    def compiled() -> Callable:
        set_compiler()
        return torch.compile(function, dynamic=True) if has_triton() else function

    @functools.wraps(function)
    def call(first: torch.Tensor, *others):
        return (compiled() if first.is_cuda else function)(first, *others)

    return cast(F, call)


def set_compiler() -> None:
    """Sets torch's compiler options for the current thread; before torch 2.13, for the whole process.

    - Floats are constants. A variable ε of a norm would be a tensor on the host and need host code, and torch would
      first spend 40 s on finding out what the host's processor supports.
    - Trainer and engine compile the same classes, so more variants per class are allowed.
    - The share of saved activations, which include attention: by default torch chooses only among its own operators and
      always recomputes others.
    - One fusion for large batches is off: it would recompile for a batch that is much smaller than the first one.
    """
    torch._dynamo.config.specialize_float = True
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    torch._functorch.config.activation_memory_budget = SAVED_SHARE
    torch._functorch.config.is_non_builtin_to_include = True
    torch._inductor.config.triton.mix_order_reduction = False


def is_compiled(model: PreTrainedModel) -> bool:
    """Whether the trainer compiles the layers: on CUDA with Triton."""
    return model.device.type == "cuda" and has_triton()


def compile_layers(model: PreTrainedModel, options: Mapping[str, Any] | None = None) -> None:
    """Compiles each decoder layer by itself: layers share their code, so the first step waits for one layer only.

    `options` are those of torch.compile.
    """
    set_compiler()
    if model.device.type == "cuda":
        register_cost_of_attention()
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # float32 is intended
    for layers in model.get_decoder().children():
        if isinstance(layers, torch.nn.ModuleList):
            for layer in layers:
                layer.compile(dynamic=True, options=None if options is None else dict(options))


def register_cost_of_attention() -> None:
    """Tells torch how many operations attention takes. Without this, torch assumes 0 and recomputes attention first.

    The count ignores the causal mask: attention is slower than a plain product, so this is about what it costs.
    """
    import torch.nn.attention.varlen  # registers the operator

    attention = torch.ops.torch_attn._varlen_attn
    if attention not in flop_registry:
        register_flop_formula(attention)(attention_flops)


def attention_flops(query: tuple[int, ...], *others, out_shape=None, **kwargs) -> int:
    """For shapes `[tokens, heads, head_dim]`: one product with the keys and one with the values."""
    longest_key = others[5]
    return 4 * math.prod(query) * longest_key
