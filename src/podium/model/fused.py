"""torch.compile where it pays: on CUDA with Triton, for the decoder's layers and a few elementwise functions.

Everything here computes what the plain code computes; only the number of kernels and the memory traffic differ.
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

from podium.errors import InputError

F = TypeVar("F", bound=Callable)

SAVED_SHARE = 0.7
"""Of what a layer's backward pass could keep, the share that it keeps: the products and attention. The rest, cheap to
make, is made again."""


def fused_on_cuda(function: F) -> F:
    """The function, compiled the first time that it gets a CUDA tensor."""

    @functools.cache
    def compiled() -> Callable:
        set_compiler()
        return torch.compile(function, dynamic=True) if has_triton() else function

    @functools.wraps(function)
    def call(first: torch.Tensor, *others):
        return (compiled() if first.is_cuda else function)(first, *others)

    return cast(F, call)


def set_compiler() -> None:
    """torch's settings, for the thread that compiles, and before torch 2.13 for the whole process.

    - Floats are constants: a norm's ε that could change would be a tensor on the host, and code for the host too,
      before which torch tries out for 40 s what the host's processor can do.
    - Trainer and engine compile the same classes, so more forms of one are allowed.
    - The share of saved activations, of which attention is one: by default torch keeps or makes again only what is
      its own, and what others have added is always made again.
    - One fusion is off, which is for large batches alone: a batch that is small beside the first one would be compiled
      for anew.
    """
    torch._dynamo.config.specialize_float = True
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    torch._functorch.config.activation_memory_budget = SAVED_SHARE
    torch._functorch.config.is_non_builtin_to_include = True
    torch._inductor.config.triton.mix_order_reduction = False


def is_compiled(model: PreTrainedModel, wanted: bool | None) -> bool:
    """Whether the layers are to be compiled: by default on CUDA.

    Not under bfloat16 weights, whose engine samples through the same layers: every layer and every cache would ask for
    code of its own.
    """
    if wanted and model.dtype != torch.float32:
        raise InputError("trainer.compile = true needs model.dtype = 'float32'; use trainer.precision = 'bfloat16'")
    return (model.device.type == "cuda" and model.dtype == torch.float32) if wanted is None else wanted


def compile_layers(model: PreTrainedModel, options: Mapping[str, Any] | None = None) -> None:
    """Each decoder layer by itself: they share one piece of code, so the first step waits for one layer only.

    `options` are those of torch.compile.
    """
    set_compiler()
    if model.device.type == "cuda":
        tell_cost_of_attention()
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # float32 is asked for on purpose
    for layers in model.get_decoder().children():
        if isinstance(layers, torch.nn.ModuleList):
            for layer in layers:
                layer.compile(dynamic=True, options=None if options is None else dict(options))


def tell_cost_of_attention() -> None:
    """An operator whose operations torch cannot count costs nothing in its eyes, and would be made again first.

    Counted without the causal mask, which is about what it takes: it is slower than a plain product.
    """
    import torch.nn.attention.varlen  # registers the operator

    attention = torch.ops.torch_attn._varlen_attn
    if attention not in flop_registry:
        register_flop_formula(attention)(attention_flops)


def attention_flops(query: tuple[int, ...], *others, out_shape=None, **kwargs) -> int:
    """Of shapes `[tokens, heads, head_dim]`: a product with the keys and one with the values."""
    longest_key = others[5]
    return 4 * math.prod(query) * longest_key
