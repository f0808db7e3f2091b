"""Large linear layers of the in-process engine on a CPU, their weights in the order that oneDNN likes.

A decode step multiplies few rows with every weight. With the weights in that order it takes about half the time of
torch's own product. The order is a copy, made anew at each sync.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from podium.model.products import is_plain_linear

LEAST_WEIGHTS = 1 << 17
"""Of a layer: a smaller one gains less than the call costs."""
ROWS = 64
"""For which the order is chosen; it serves other numbers of rows too."""


class PackedLinear(torch.nn.Module):
    """Stands for a linear layer, whose parameters it keeps; it computes with the weights as of the last `pack`."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.pack(layer.weight)

    def pack(self, weight: torch.Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)

    def unpacked(self) -> torch.Tensor:
        """The weights that it computes with, in their plain order."""
        return self._packed.to_dense()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


def pack_layers(model: PreTrainedModel) -> list[PackedLinear]:
    """Puts packed layers in the place of the large ones, the LM head included, where this torch can compute them."""
    packed = []
    for name, layer in _large_layers(model):
        if isinstance(layer, PackedLinear):  # by another engine over the same layers
            layer.pack(layer.weight)
        else:
            layer = PackedLinear(layer)
            model.set_submodule(name, layer)
        packed.append(layer)
    return packed


def packed_weights(model: PreTrainedModel) -> list[torch.Tensor]:
    """Of which `pack_layers` makes, or has made, a copy."""
    return [layer.weight for _, layer in _large_layers(model)]


def _large_layers(model: PreTrainedModel) -> list[tuple[str, Any]]:
    if model.device.type != "cpu" or model.dtype != torch.float32 or not _can_pack():
        return []
    linear: list[tuple[str, Any]] = [
        (name, layer)
        for name, layer in model.named_modules()
        if is_plain_linear(layer) or isinstance(layer, PackedLinear)
    ]
    return [(name, layer) for name, layer in linear if layer.weight.numel() >= LEAST_WEIGHTS]


def _can_pack() -> bool:
    """Tried out: the two operators are torch's own, but not promised to anyone."""
    layer: Any = torch.nn.utils.skip_init(torch.nn.Linear, 16, 16, bias=False)  # draws no random numbers
    x = torch.arange(16.0)[None]
    try:
        with torch.no_grad():
            layer.weight.copy_(2 * torch.eye(16))
            return torch.allclose(PackedLinear(layer)(x), 2 * x)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
