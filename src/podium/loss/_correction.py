"""Correction for the gap between sampler and trainer: weights on the policy loss.

    w = min(exp(clamp(old − rollout, ±20)), cap)              a token, or of the geometric mean over a rollout
    w = 0 outside [1/band, band]                              where a band is set (IcePop)
    w = 0 for a rollout whose mean log-ratio leaves sequence_band

`old` is the trainer's logprob before the update, `rollout` the sampler's: they differ when the sampler lags behind or
rounds differently. A geometric mean over a rollout does not throw long answers away as a product would. The defaults
are silent while all is well.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from podium.loss._ratio import MAX_LOG_RATIO, mean_by_document
from podium.records import Batch


@dataclass(frozen=True)
class Correction:
    level: Literal["token", "sequence"] = "token"
    cap: float = 2.0
    band: float | None = None
    sequence_band: tuple[float, float] | None = (0.5, 2.0)


def correction_weights(old: torch.Tensor, batch: Batch, correction: Correction | None) -> torch.Tensor:
    """`[T]` without gradient; 1 everywhere if the correction is off."""
    if correction is None:
        return torch.ones_like(batch.loss_mask)
    gap = ((old - batch.rollout_logprobs) * batch.loss_mask).detach()  # prompt positions hold no logprobs
    of_rollout = mean_by_document(gap, batch)
    chosen = gap if correction.level == "token" else of_rollout
    ratio = chosen.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weights = ratio.clamp(max=correction.cap)
    if correction.band is not None:
        weights = weights * ((ratio >= 1 / correction.band) & (ratio <= correction.band))
    if correction.sequence_band is not None:
        low, high = (math.log(bound) for bound in correction.sequence_band)
        weights = weights * ((of_rollout >= low) & (of_rollout <= high))
    return weights
