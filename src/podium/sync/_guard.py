"""Before each push: weights that are no numbers never reach an engine."""

import math
from collections.abc import Iterable

import torch

from podium.errors import WeightsError


@torch.no_grad()
def check_finite(weights: Iterable[tuple[str, torch.Tensor]], when: str) -> None:
    """Raises `WeightsError` naming the first tensor that is not finite; waits for the device once.

    One value that is no number makes a sum none, and a sum is several times faster than asking each value; finite
    values whose sum is too large are asked.
    """
    named = list(weights)
    sums = torch.stack([tensor.sum(dtype=torch.float32) for _, tensor in named]).tolist() if named else []
    for (name, tensor), total in zip(named, sums, strict=True):
        if not math.isfinite(total) and not tensor.isfinite().all():
            raise WeightsError(
                f"{name} holds values that are no finite numbers {when}; the last checkpoint is from before: resume "
                "with a lower trainer.lr"
            )
