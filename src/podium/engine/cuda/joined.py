"""Linear layers of the engine: with a LoRA adapter, and several of them computed as one product.

A decode step has few rows, so what a product costs is mostly its start and reading the weights: three products for
queries, keys and values take three times as long as one. The weights of such a set of layers become parts of one
tensor, whose last rows are the A halves of their adapters. So one product gives the base outputs and A·x of all of
them, and one more kernel adds the branches: the B halves are blocks of one matrix that is 0 elsewhere.

Nothing is held twice: a layer that shares its weight with the trainer's keeps sharing it, as a part of the joined one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from podium.model.forward import ExactLinear, exact_linear

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module with one input, in the order in which transformers' models call them."""
LEAST_INNER = 16
"""The A halves are padded with rows of zeros to this or a higher power of 2, as kernels need it."""


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
    """The weights of layers with one input, one below the other, and their product while a step is under way."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
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
        for names in SIBLINGS:
            layers = [getattr(module, name, None) for name in names]
            if all(map(_can_join, layers)) and len({_form(layer) for layer in layers}) == 1:
                module.add_module(_joined_name(names), Joined(layers))  # type: ignore[arg-type]
        done = {name for names in _sets(module) for name in names}
        for name, layer in list(module.named_children()):
            if isinstance(layer, AdaptedLinear) and name not in done:
                module.add_module(_joined_name((name,)), Joined([layer]))


def join_products(model: torch.nn.Module) -> None:
    """Lets a twin of such a model compute one product per set; it is for decoding only."""
    for module in list(model.modules()):
        for names in _sets(module):
            for number, name in enumerate(names):
                setattr(module, name, JoinedPart(getattr(module, _joined_name(names)), number))


def apart(model: torch.nn.Module) -> list[str]:
    """Layers whose weights are no longer parts of the joined ones."""
    found = []
    for path, module in model.named_modules():
        for names in _sets(module):
            joined = getattr(module, _joined_name(names))
            kept = {tensor.untyped_storage().data_ptr() for tensor in joined.buffers()}
            for name in names:
                layer = getattr(module, name)
                own = [layer.weight, *(getattr(layer, half) for half in ("a", "b") if hasattr(layer, half))]
                if any(tensor.untyped_storage().data_ptr() not in kept for tensor in own):
                    found.append(f"{path}.{name}")
    return found


def _sets(module: torch.nn.Module) -> list[tuple[str, ...]]:
    """The names of the layers of each `Joined` of a module."""
    return [
        tuple(name.removeprefix(PREFIX).split(SEPARATOR))
        for name, child in module.named_children()
        if isinstance(child, Joined)
    ]


PREFIX, SEPARATOR = "joined_", "__and__"


def _joined_name(names: tuple[str, ...]) -> str:
    return PREFIX + SEPARATOR.join(names)


def _form(layer: Any) -> tuple[bool, int, torch.dtype]:
    """What layers of one product have in common."""
    return layer.bias is None, layer.weight.shape[1], layer.weight.dtype


def _can_join(layer: object) -> bool:
    return type(layer) is torch.nn.Linear or (isinstance(layer, AdaptedLinear) and not layer.is_exact)
