"""How long the runtime waits for its workers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    start_s: float
    frozen_s: float
    stalled_s: float
    recovery_s: float
    max_restarts: int
