"""The learning rate by update: warm-up, then constant, linear or cosine decay to zero at the run's last step."""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def rate_at(lr: float, step: int, *, warmup_steps: int, total_steps: int, schedule: Schedule) -> float:
    """Rate of the step numbered from 0. Warm-up rises in equal parts; the decay begins where it ends."""
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    left = max(0.0, 1 - done)
    return lr * (left if schedule == "linear" else (1 + math.cos(math.pi * (1 - left))) / 2)
