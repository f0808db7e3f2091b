"""Linear layers of the in-process engine: packed, with a LoRA adapter, and several of them computed as one product.

A decode step has few rows, so a product costs little more than its start and reading the weights. On a CPU, large
layers keep a copy of their weights in the order that oneDNN prefers, made again at each sync. A decode step takes about
half the time with it.

On a GPU, three products for queries, keys and values take three times as long as one. The weights of such a set of
layers become parts of one tensor, whose last rows are the A halves of their adapters. So one product gives the base
outputs and A·x of all of them, and one more kernel adds the branches: the B halves are blocks of one matrix that is 0
elsewhere. Nothing is held twice: a layer that shares its weight with the trainer's keeps sharing it, as a part of the
joined one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from podium.model.forward import ExactLinear, exact_linear, is_plain_linear

LEAST_WEIGHTS = 1 << 17
"""A layer with fewer weights is not packed: it would gain less than the call costs."""
PACKED_ROWS = 64
"""The order is chosen for this number of rows; it works for other numbers too."""
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module with one input, in the order in which transformers' models call them."""
LEAST_INNER = 16
"""The A halves are padded with rows of zeros to this or a higher power of 2, as kernels need it."""


class PackedLinear(torch.nn.Module):
    """Replaces a linear layer and keeps its parameters, but multiplies with the weights of the last `pack`."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.pack(layer.weight)

    def pack(self, weight: torch.Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_ROWS)

    def unpacked(self) -> torch.Tensor:
        """The weights that it computes with, in their plain order."""
        return self._packed.to_dense()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


def pack_layers(model: PreTrainedModel) -> None:
    """Replaces the large layers, the LM head included, by packed ones if this torch can compute them."""
    for name, layer in _large_layers(model):
        model.set_submodule(name, PackedLinear(layer))


def packed_weights(model: PreTrainedModel) -> list[torch.Tensor]:
    """The weights of which `pack_layers` makes, or has made, a copy."""
    return [layer.weight for _, layer in _large_layers(model)]


def _large_layers(model: PreTrainedModel) -> list[tuple[str, Any]]:
    if model.device.type != "cpu" or model.dtype != torch.float32 or not _can_pack():
        return []
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if (is_plain_linear(layer) or isinstance(layer, PackedLinear)) and layer.weight.numel() >= LEAST_WEIGHTS
    ]


def _can_pack() -> bool:
    """Whether torch's two operators for packed layers work; they are not part of its public interface."""
    layer: Any = torch.nn.utils.skip_init(torch.nn.Linear, 16, 16, bias=False)  # draws no random numbers
    x = torch.arange(16.0)[None]
    try:
        with torch.no_grad():
            layer.weight.copy_(2 * torch.eye(16))
            return torch.allclose(PackedLinear(layer)(x), 2 * x)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False


@torch.library.custom_op("podium::add_branches", mutates_args=("product",))
def add_branches(product: torch.Tensor, b: torch.Tensor, scale: float) -> None:
    """Adds scale · B·A·x to the outputs, in place.

    `product` `[rows, outputs + inner]` is that of a `Joined`, whose last columns are A·x; `b` `[outputs, inner]` are
    the B halves. On CUDA this is one kernel per set of layers, where a product, a sum and their copies would be four.
    """
    outputs, inner = product.split([len(b), product.shape[1] - len(b)], 1)
    outputs += linear(inner.to(b.dtype), b) * scale


@add_branches.register_kernel("cuda")
def _on_cuda(product: torch.Tensor, b: torch.Tensor, scale: float) -> None:
    from podium.engine.cuda.kernels import add_branches_on_cuda  # needs Triton

    add_branches_on_cuda(product, b, scale)


class AdaptedLinear(torch.nn.Module):
    """base(x) + scale · B·A·x, with the products that the trainer's own adapter layers make.

    A merged bfloat16 weight would round small updates away, so the sampler would not be the policy that is trained.
    """

    def __init__(self, base: torch.nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.weight, self.bias, self.scale = base.weight, base.bias, scale
        self.out_features = base.out_features
        self.is_exact = isinstance(base, ExactLinear)
        self._linear = exact_linear if self.is_exact else linear
        shapes = {"a": (rank, base.in_features), "b": (base.out_features, rank)}
        for name, shape in shapes.items():
            self.register_buffer(name, base.weight.detach().new_zeros(shape), persistent=False)

    a: torch.Tensor
    b: torch.Tensor

    def load(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.a.copy_(a)
        self.b.copy_(b)

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        """scale · B·A·x"""
        return linear(linear(x, self.a), self.b) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x, self.weight, self.bias) + self.branch(x)


Layer = torch.nn.Linear | AdaptedLinear


class Joined(torch.nn.Module):
    """The weights of layers with one input, one below the other, and their product while a step is under way. `names`
    are those of the layers in their module."""

    def __init__(self, names: tuple[str, ...], layers: list[Layer]) -> None:
        super().__init__()
        self.names = names
        adapted = [layer for layer in layers if isinstance(layer, AdaptedLinear)]
        self.sizes = [layer.out_features for layer in layers]
        self.scale = adapted[0].scale if adapted else 0.0
        self.product: torch.Tensor | None = None
        self._linear = exact_linear if any(layer.is_exact for layer in adapted) else linear
        inner = [layer.a for layer in adapted]
        if adapted:
            used = sum(map(len, inner))
            padded = max(LEAST_INNER, 1 << (used - 1).bit_length())
            inner.append(inner[0].new_zeros(padded - used, inner[0].shape[1]))
        self._join("weight", [layer.weight for layer in layers], inner)
        if layers[0].bias is None:
            self.register_buffer("bias", None)
        else:
            biases = [layer.bias for layer in layers]
            self._join("bias", biases, [biases[0].detach().new_zeros(sum(map(len, inner)))])
        self.register_buffer("b", None, persistent=False)
        if adapted:
            self._join_branches(layers, self.weight[sum(self.sizes) :])

    weight: torch.Tensor
    bias: torch.Tensor | None
    b: torch.Tensor | None
    """`[outputs, inner]`, the B halves as blocks."""

    def _join(self, name: str, parts: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
        whole = torch.cat([*(part.detach() for part in parts), *others])
        self.register_buffer(name, whole, persistent=False)
        for part, own in zip(parts, whole[: sum(self.sizes)].split(self.sizes), strict=True):
            part.data = own  # also for the trainer's layer, if it has the same parameter

    def _join_branches(self, layers: list[Layer], inner: torch.Tensor) -> None:
        self.b = inner.new_zeros(sum(self.sizes), len(inner))
        row = column = 0
        for layer, size in zip(layers, self.sizes, strict=True):
            if isinstance(layer, AdaptedLinear):
                rank = len(layer.a)
                layer.a = inner[column : column + rank]
                block = self.b[row : row + size, column : column + rank]
                layer.b = block.copy_(layer.b)
                column += rank
            row += size

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        """Those of all layers, one after the other; what comes behind them is of no use."""
        product = self._linear(x, self.weight, self.bias)
        if self.b is not None:
            add_branches(product.view(-1, product.shape[-1]), self.b, self.scale)
        return product


class JoinedPart(torch.nn.Module):
    """Stands for one of the layers."""

    def __init__(self, joined: Joined, number: int) -> None:
        super().__init__()
        self.joined = joined
        self.begin, self.end = sum(joined.sizes[:number]), sum(joined.sizes[: number + 1])
        self.out_features = self.end - self.begin
        self.is_first, self.is_last = number == 0, number == len(joined.sizes) - 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            self.joined.product = self.joined.outputs(x)
        product = self.joined.product
        assert product is not None
        if self.is_last:
            self.joined.product = None
        return product[..., self.begin : self.end]


def join_weights(model: torch.nn.Module) -> None:
    """Siblings, where they are plain or adapted layers, and every other adapted layer by itself. They compute what they
    did before, each by itself."""
    for module in list(model.modules()):
        sets = [names for names in SIBLINGS if _can_join([getattr(module, name, None) for name in names])]
        done = {*chain(*sets), *chain(*(joined.names for joined in _joined(module)))}
        alone = [n for n, layer in module.named_children() if isinstance(layer, AdaptedLinear) and n not in done]
        for names in [*sets, *((name,) for name in alone)]:
            layers = [getattr(module, name) for name in names]
            module.add_module(f"joined_{'__and__'.join(names)}", Joined(names, layers))


def join_products(model: torch.nn.Module) -> None:
    """Lets a twin of such a model compute one product per set; it is for decoding only."""
    for module in list(model.modules()):
        for joined in _joined(module):
            for number, name in enumerate(joined.names):
                setattr(module, name, JoinedPart(joined, number))


def apart(model: torch.nn.Module) -> list[str]:
    """Layers whose weights are no longer parts of the joined ones."""
    found = []
    for path, module in model.named_modules():
        for joined in _joined(module):
            kept = {tensor.untyped_storage().data_ptr() for tensor in joined.buffers()}
            for name in joined.names:
                layer = getattr(module, name)
                own = [layer.weight, *(getattr(layer, half) for half in ("a", "b") if hasattr(layer, half))]
                if any(tensor.untyped_storage().data_ptr() not in kept for tensor in own):
                    found.append(f"{path}.{name}")
    return found


def _joined(module: torch.nn.Module) -> list[Joined]:
    return [child for child in module.children() if isinstance(child, Joined)]


def _can_join(layers: Sequence[Any]) -> bool:
    """Whether all are plain or adapted layers, alike in bias, input and precision."""
    return (
        all(type(each) is torch.nn.Linear or (isinstance(each, AdaptedLinear) and not each.is_exact) for each in layers)
        and len({(each.bias is None, each.weight.shape[1], each.weight.dtype) for each in layers}) == 1
    )
