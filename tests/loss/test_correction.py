"""The weights for the gap between sampler and trainer, by hand."""

import math
from dataclasses import replace

import pytest
import torch

from podium.loss.grpo import grpo
from podium.loss.objective import Correction, Objective, correction_weights
from tests.loss.batches import a_batch

LN = math.log
# two documents: old − rollout = ln 1.5, ln 4 | ln 0.5
BATCH = replace(
    a_batch([2, 1], [1.0, -1.0]), rollout_logprobs=torch.tensor([0.0, -1 - LN(1.5), -1 - LN(4), 0.0, -1 - LN(0.5)])
)
OLD = torch.tensor([0.0, -1.0, -1.0, 0.0, -1.0])


def weights(**fields) -> list[float]:
    made = correction_weights(OLD, BATCH, Correction(**{"sequence_band": None, **fields})).tolist()
    return [made[1], made[2], made[4]]


def test_token_weights_are_the_truncated_ratio() -> None:
    assert weights() == pytest.approx([1.5, 2.0, 0.5], abs=1e-6)
    assert weights(cap=5.0) == pytest.approx([1.5, 4.0, 0.5], abs=1e-6)


def test_sequence_weights_are_the_geometric_mean() -> None:
    # √(1.5·4) = 2.4494897, and 0.5
    assert weights(level="sequence", cap=5.0) == pytest.approx([2.4494897, 2.4494897, 0.5], abs=1e-6)
    assert weights(level="sequence") == pytest.approx([2.0, 2.0, 0.5], abs=1e-6)


def test_tokens_outside_the_band_get_nothing() -> None:
    assert weights(band=1.8) == pytest.approx([1.5, 0, 0], abs=1e-6)  # 4 > 1.8 and 0.5 < 1/1.8


def test_rollouts_outside_the_sequence_band_get_nothing() -> None:
    # geometric means 2.449 and 0.5: the first leaves [0.5, 2]
    assert weights(sequence_band=(0.49, 2.0)) == pytest.approx([0, 0, 0.5], abs=1e-6)
    assert weights(sequence_band=(0.6, 3.0)) == pytest.approx([1.5, 2.0, 0], abs=1e-6)


def test_a_sampler_that_agrees_is_left_alone_exactly() -> None:
    batch = replace(BATCH, rollout_logprobs=OLD)
    assert correction_weights(OLD, batch, Correction()).tolist() == [1.0] * 5


def test_off_means_one_everywhere() -> None:
    assert correction_weights(OLD, BATCH, None).tolist() == [1.0] * 5


def test_the_policy_term_is_weighed_and_carries_no_gradient_through_the_weights() -> None:
    policy = OLD.clone().requires_grad_()
    Objective(grpo, correction=Correction(sequence_band=None))(policy, BATCH).loss.backward()
    # −A·w/3: −1.5/3, −2/3, 0.5/3
    assert policy.grad.tolist() == pytest.approx([0, -0.5, -2 / 3, 0, 0.5 / 3], abs=1e-6)
