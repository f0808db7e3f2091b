"""torch.compile where it pays: on CUDA with Triton, for the decoder's layers and a few elementwise functions.

Everything here computes what the plain code computes; only the number of kernels and the memory traffic differ.
"""

import functools
import warnings
from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch._functorch.config
from torch.utils._triton import has_triton
from transformers import PreTrainedModel

F = TypeVar("F", bound=Callable)

SAVED_SHARE = 0.5
"""Of what a layer's backward pass could keep, the share that it keeps; the rest, cheap to make, is made again."""


def fused_on_cuda(function: F) -> F:
    """The function, compiled the first time that it gets a CUDA tensor."""

    @functools.cache
    def compiled() -> Callable:
        return torch.compile(function, dynamic=True) if has_triton() else function

    @functools.wraps(function)
    def call(first: torch.Tensor, *others):
        return (compiled() if first.is_cuda else function)(first, *others)

    return cast(F, call)


def compile_layers(model: PreTrainedModel) -> None:
    """Each decoder layer by itself: they share one piece of code, so the first step waits for one layer only."""
    torch._functorch.config.activation_memory_budget = SAVED_SHARE
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # float32 is asked for on purpose
    for layer in model.get_decoder().layers:  # type: ignore[union-attr]
        layer.compile(dynamic=True)
