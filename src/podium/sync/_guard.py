"""Before each push: weights that are no numbers never reach an engine."""

from collections.abc import Iterable

import torch

from podium.errors import WeightsError


@torch.no_grad()
def check_finite(weights: Iterable[tuple[str, torch.Tensor]], when: str) -> None:
    """Raises `WeightsError` naming the first tensor that is not finite; waits for the device once."""
    named = list(weights)
    verdicts = torch.stack([tensor.isfinite().all() for _, tensor in named]).tolist() if named else []
    for (name, _), is_finite in zip(named, verdicts, strict=True):
        if not is_finite:
            raise WeightsError(
                f"{name} holds values that are no finite numbers {when}; the last checkpoint is from before: resume "
                "with a lower trainer.lr"
            )
