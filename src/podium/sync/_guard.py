"""Before each push: weights that are no numbers never reach an engine."""

import math
from collections.abc import Iterable

import torch
from torch.nn.utils import get_total_norm

from podium.errors import WeightsError


@torch.no_grad()
def check_finite(weights: Iterable[tuple[str, torch.Tensor]], when: str) -> None:
    """Raises `WeightsError` naming the first tensor that is not finite; waits for the device once.

    One value that is no number makes the norm of all none; finite values whose norm is too large are asked themselves.
    """
    named = list(weights)
    if math.isfinite(get_total_norm([tensor for _, tensor in named])):
        return
    for name, tensor in named:
        if not tensor.isfinite().all():
            raise WeightsError(
                f"{name} holds values that are no finite numbers {when}; the last checkpoint is from before: resume "
                "with a lower trainer.lr"
            )
