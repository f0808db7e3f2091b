"""A linear layer with a LoRA adapter beside it, in the precision in which the trainer computes.

A merged bfloat16 weight would round small updates away, so the sampler would not be the policy that is trained.
"""

import torch
from torch.nn.functional import linear

from podium.model.products import ExactLinear, exact_linear


class AdaptedLinear(torch.nn.Module):
    """base(x) + scale · B·A·x, with the products that the trainer's own adapter layers make."""

    def __init__(self, base: torch.nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.weight, self.bias, self.scale = base.weight, base.bias, scale
        self.out_features = base.out_features
        self._linear = exact_linear if isinstance(base, ExactLinear) else linear
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
