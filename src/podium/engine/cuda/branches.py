"""The branches of adapted layers, added to their base outputs in one pass over these.

In: the product `[rows, outputs + inner]` of a `Joined`, whose last columns are A·x, and the B halves
`[outputs, inner]`. The branches scale · B·A·x are added to the outputs in place. On CUDA that is one kernel per set of
layers, where a product, a sum and their copies would be four.
"""

import torch
from torch.nn.functional import linear


@torch.library.custom_op("podium::add_branches", mutates_args=("product",))
def add_branches(product: torch.Tensor, b: torch.Tensor, scale: float) -> None:
    outputs, inner = product.split([len(b), product.shape[1] - len(b)], 1)
    outputs += linear(inner.to(b.dtype), b) * scale


@add_branches.register_kernel("cuda")
def _on_cuda(product: torch.Tensor, b: torch.Tensor, scale: float) -> None:
    from podium.engine.cuda.branches_kernel import add_branches_on_cuda  # needs Triton

    add_branches_on_cuda(product, b, scale)
