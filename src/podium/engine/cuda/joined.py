"""Linear layers that get the same input, computed as one product.

A decode step has few rows, so what a product costs is mostly its start: three products for queries, keys and values
take three times as long as one. The layers' weights become parts of one tensor, so that loading them one by one loads
it too; in the decoding twin the first layer of a set computes the product of all and the others take their part.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module with one input, in the order in which transformers' models call them."""


class Joined(torch.nn.Module):
    """Weights of several layers, one below the other, and their product while a step is under way."""

    def __init__(self, layers: list[torch.nn.Linear]) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        self.product: torch.Tensor | None = None
        for name in ("weight", "bias"):
            parts = [getattr(layer, name) for layer in layers]
            whole = None if parts[0] is None else torch.cat([part.detach() for part in parts])
            self.register_buffer(name, whole, persistent=False)
            if whole is not None:
                for layer, part in zip(layers, whole.split(self.sizes), strict=True):
                    setattr(layer, name, torch.nn.Parameter(part, requires_grad=False))


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
            self.joined.product = linear(x, self.joined.weight, self.joined.bias)  # type: ignore[arg-type]
        product = self.joined.product
        assert product is not None
        if self.is_last:
            self.joined.product = None
        return product[..., self.begin : self.end]


def join_weights(model: torch.nn.Module) -> None:
    """Where the layers are plain ones; they compute what they did before, each by itself."""
    for module in list(model.modules()):
        for names in SIBLINGS:
            layers = [getattr(module, name, None) for name in names]
            if all(type(layer) is torch.nn.Linear for layer in layers) and len({_has_bias(x) for x in layers}) == 1:
                module.add_module(_joined_name(names), Joined(layers))  # type: ignore[arg-type]


def join_products(model: torch.nn.Module) -> None:
    """Lets a twin of such a model compute one product a set; it is for decoding only."""
    for module in list(model.modules()):
        for names in SIBLINGS:
            joined = getattr(module, _joined_name(names), None)
            if joined is not None:
                for number, name in enumerate(names):
                    setattr(module, name, JoinedPart(joined, number))


def apart(model: torch.nn.Module) -> list[str]:
    """Layers whose weights are no longer parts of the joined ones."""
    found = []
    for path, module in model.named_modules():
        for names in SIBLINGS:
            joined = getattr(module, _joined_name(names), None)
            if joined is not None:
                parts = zip(names, joined.weight.split(joined.sizes), strict=True)
                found += [f"{path}.{n}" for n, part in parts if getattr(module, n).weight.data_ptr() != part.data_ptr()]
    return found


def _joined_name(names: tuple[str, ...]) -> str:
    return "joined_" + "_".join(names)


def _has_bias(layer: torch.nn.Linear | None) -> bool:
    return layer is not None and layer.bias is not None
