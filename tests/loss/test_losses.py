"""Every loss: value and gradient against numbers worked by hand.

Two documents with one prompt token each: the first has answer tokens a1, a2 (A = 2), the second b1 (A = −1). Ratios
policy/old are given per token; `rollout` defaults to old. Averages: tokens divides by 3, rollouts by 2 with each
rollout's own length.
"""

import math
from typing import Any

import pytest
import torch

from podium.loss import traits_of
from podium.loss.cispo import cispo
from podium.loss.dapo import dapo
from podium.loss.dro import dro
from podium.loss.grpo import grpo
from podium.loss.gspo import gspo
from podium.loss.importance_sampling import importance_sampling
from podium.loss.mean_logprob import mean_logprob
from podium.loss.objective import Correction, Objective
from podium.loss.reinforce import reinforce
from podium.loss.sequence import sequence
from podium.records import LossOutput
from tests.loss.batches import a_batch

OLD = [-1.0, -0.5, -2.0]
LN = math.log


def output(
    loss: Any,
    ratios: list[float],
    *,
    advantages: tuple[float, float] = (2.0, -1.0),
    rollout: list[float] | None = None,
    options: dict[str, Any] | None = None,
    **objective: Any,
) -> tuple[LossOutput, list[float]]:
    """The loss on the two documents and its gradient on a1, a2, b1."""
    policy = torch.tensor(
        [0.0, *(o + LN(r) for o, r in zip(OLD[:2], ratios[:2], strict=True)), 0.0, OLD[2] + LN(ratios[2])]
    )
    policy.requires_grad_()
    batch = a_batch(
        [2, 1],
        list(advantages),
        old_logprobs=torch.tensor([0.0, *OLD[:2], 0.0, OLD[2]]),
        rollout_logprobs=torch.tensor([0.0, *(rollout or OLD)[:2], 0.0, (rollout or OLD)[2]]),
    )
    average = traits_of(loss).average or "tokens"
    made = Objective(
        policy_loss=lambda p, o, b: loss(p, o, b, **(options or {})), **({"average": average} | objective)
    )(policy, batch)
    made.loss.backward()
    assert policy.grad is not None
    gradient = policy.grad.tolist()
    assert gradient[0] == gradient[3] == 0  # prompt tokens carry none
    return made, [gradient[1], gradient[2], gradient[4]]


CASES = {
    # −r·A: −2·1.1, −2·0.9, 1·1.1; mean over 3; the gradient of −r·A is −r·A
    "grpo inside the clip": (grpo, [1.1, 0.9, 1.1], {}, (-2.2 - 1.8 + 1.1) / 3, [-2.2 / 3, -1.8 / 3, 1.1 / 3]),
    # A > 0: r = 1.5 counts as 1.2 without gradient, 0.5 is not clipped; A < 0: 0.5 counts as 0.8 without gradient
    "grpo clipped": (grpo, [1.5, 0.5, 0.5], {}, (-2.4 - 1.0 + 0.8) / 3, [0, -1.0 / 3, 0]),
    # A < 0 and r = 1.5: no clip above
    "grpo not clipped above when bad": (grpo, [1.0, 1.0, 1.5], {}, (-2 - 2 + 1.5) / 3, [-2 / 3, -2 / 3, 1.5 / 3]),
    "grpo with an explicit clip of 0": (grpo, [1.1, 1, 1], {"clip": (0.2, 0.0)}, (-2 - 2 + 1) / 3, [0, -2 / 3, 1 / 3]),
    # 1.25 is inside DAPO's 1.28
    "dapo": (dapo, [1.25, 1.5, 1.0], {}, (-2.5 - 2.56 + 1) / 3, [-2.5 / 3, 0, 1 / 3]),
    # A < 0, r = 4: the loss 4 is bounded by 3·1, without gradient
    "dapo with a dual clip": (dapo, [1, 1, 4.0], {"dual_clip": 3.0}, (-2 - 2 + 3) / 3, [-2 / 3, -2 / 3, 0]),
    "dapo, dual clip not reached": (dapo, [1, 1, 2.0], {"dual_clip": 3.0}, (-2 - 2 + 2) / 3, [-2 / 3, -2 / 3, 2 / 3]),
    "importance_sampling": (importance_sampling, [3.0, 0.1, 2.0], {}, (-6 - 0.2 + 2) / 3, [-2, -0.2 / 3, 2 / 3]),
    # 3 counts as 2, without gradient
    "importance_sampling, truncated": (
        importance_sampling, [3.0, 0.1, 1.0], {"max_ratio": 2.0}, (-4 - 0.2 + 1) / 3, [0, -0.2 / 3, 1 / 3],
    ),
    "reinforce": (reinforce, [1.5, 0.5, 1.0], {}, (-3 - 1 + 1) / 3, [-1, -1 / 3, 1 / 3]),
    # −A·lp with lp = old + ln r: −2·(−1 + ln 1.5) = 1.18907, −2·(−0.5 + ln 0.5) = 2.386294, 1·(−2) = −2
    "reinforce without ratio": (
        reinforce, [1.5, 0.5, 1.0], {"ratio": False}, (1.1890698 + 2.3862944 - 2.0) / 3, [-2 / 3, -2 / 3, 1 / 3],
    ),
    # −lp·A + ½·0.05·(lp − rollout)²; lp − rollout = ln 2, 0, 0: (ln 2)² = 0.4804530, gradient 0.05·ln 2 = 0.0346574
    "dro": (
        dro, [2.0, 1.0, 1.0], {}, (-2 * (-1 + LN(2)) + 1 - 2 + 0.025 * 0.4804530) / 3,
        [(-2 + 0.0346574) / 3, -2 / 3, 1 / 3],
    ),
    # s of the first = (ln 1.5 + ln 0.5)/2 = ln √0.75; both tokens have that ratio: 0.8660254; of the second 1.1
    # per rollout: −2·0.8660254 and 1.1, mean over 2; gradient −r·A/(2 tokens · 2 rollouts), and r/2 for the second
    "gspo, wide clip": (
        gspo, [1.5, 0.5, 1.1], {"clip": 0.5}, (-2 * 0.8660254 + 1.1) / 2,
        [-2 * 0.8660254 / 4, -2 * 0.8660254 / 4, 1.1 / 2],
    ),
    # default bounds 3e-4 / 4e-4: 1.01 with A > 0 counts as 1.0004, 0.99 with A < 0 as 0.9997, neither with gradient
    "gspo clipped": (gspo, [1.01, 1.01, 0.99], {}, (-2 * 1.0004 + 0.9997) / 2, [0, 0, 0]),
    # weights clamp(r, 0.8, 1.28): 1.28, 0.8, 1; −w·A·lp: lp = −1 + ln 1.5, −0.5 + ln 0.5, −2; every token keeps −w·A
    "cispo": (
        cispo, [1.5, 0.5, 1.0], {}, (-2.56 * (-1 + LN(1.5)) - 1.6 * (-0.5 + LN(0.5)) - 2) / 3,
        [-2.56 / 3, -1.6 / 3, 1 / 3],
    ),
    "cispo without a lower bound": (
        cispo, [1.5, 0.5, 1.0], {"clip": ("none", 0.28)}, (-2.56 * (-1 + LN(1.5)) - 1.0 * (-0.5 + LN(0.5)) - 2) / 3,
        [-2.56 / 3, -1.0 / 3, 1 / 3],
    ),
    # products 1.1·1.05 = 1.155 and 1.1; −2·1.155 and 1.1, mean over 2; d/d lp = −r·A/2 on each token
    "sequence": (sequence, [1.1, 1.05, 1.1], {}, (-2.31 + 1.1) / 2, [-2.31 / 2, -2.31 / 2, 1.1 / 2]),
    # product 1.5: beyond 1.2, counts as 1.2 without gradient
    "sequence clipped": (sequence, [1.5, 1.0, 1.0], {}, (-2.4 + 1) / 2, [0, 0, 0.5]),
    # −2·(−1 − 0.5)/2 = 1.5 and 1·(−2) = −2, mean over 2; gradient −2/2/2 and 1/2
    "mean_logprob": (mean_logprob, [1, 1, 1], {}, (1.5 - 2) / 2, [-0.5, -0.5, 0.5]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_by_hand(name: str) -> None:
    loss, ratios, options, expected, expected_gradient = CASES[name]
    made, gradient = output(loss, ratios, options=options)
    assert made.loss.item() == pytest.approx(expected, abs=1e-6)
    assert gradient == pytest.approx(expected_gradient, abs=1e-6)


def test_averaged_over_rollouts_every_answer_weighs_the_same() -> None:
    # (−2 − 2)/2 = −2 and 1: mean −0.5; gradients −2/(2·2) and 1/2
    made, gradient = output(grpo, [1, 1, 1], average="rollouts")
    assert made.loss.item() == pytest.approx(-0.5, abs=1e-6)
    assert gradient == pytest.approx([-0.5, -0.5, 0.5], abs=1e-6)


def test_averaged_over_a_constant_length() -> None:
    # (−2 − 2 + 1) / (2 rollouts · 8)
    made, gradient = output(grpo, [1, 1, 1], average=8)
    assert made.loss.item() == pytest.approx(-3 / 16, abs=1e-6)
    assert gradient == pytest.approx([-2 / 16, -2 / 16, 1 / 16], abs=1e-6)


def test_with_one_update_the_ratio_is_one_and_the_gradient_that_of_the_plain_policy_gradient() -> None:
    for loss in (grpo, dapo, importance_sampling):
        policy = torch.tensor([0.0, -0.7, -0.1, 0.0, -0.4], requires_grad=True)
        made = Objective(loss)(policy, a_batch([2, 1], [2.0, -1.0]))
        made.loss.backward()
        assert made.ratio.tolist() == [1.0] * 5
        assert policy.grad.tolist() == pytest.approx([0, -2 / 3, -2 / 3, 0, 1 / 3], abs=1e-6)


def test_clip_statistics_say_which_bound_took_the_gradient_away() -> None:
    made, _ = output(grpo, [1.5, 0.5, 0.5])
    assert made.clipped_high.tolist() == [False, True, False, False, False]
    assert made.clipped_low.tolist() == [False, False, False, False, True]


def test_old_may_be_the_samplers() -> None:
    # against the sampler at old + ln 2 the ratio of an unmoved policy is 0.5: −2·0.5, −2·0.5, and 0.5 counts as 0.8
    made, gradient = output(grpo, [1, 1, 1], rollout=[o + LN(2) for o in OLD], old="rollout")
    assert made.loss.item() == pytest.approx((-1 - 1 + 0.8) / 3, abs=1e-6)
    assert gradient == pytest.approx([-1 / 3, -1 / 3, 0], abs=1e-6)


def test_a_huge_ratio_stays_finite() -> None:
    made, gradient = output(importance_sampling, [math.exp(50), 1, 1], advantages=(-1.0, 0.0))
    assert made.loss.item() == pytest.approx((math.exp(20) + 1) / 3, rel=1e-6)
    assert all(math.isfinite(value) for value in gradient)


def test_dros_penalty_is_not_corrected() -> None:
    """Old and sampler differ by ln 4 on every token, so the policy term is doubled (cap 2) and the penalty is not."""
    rollout = [value - LN(4) for value in OLD]
    plain, _ = output(dro, [1.0, 1.0, 1.0], rollout=rollout)
    corrected, _ = output(dro, [1.0, 1.0, 1.0], rollout=rollout, correction=Correction(sequence_band=None))
    # policy terms −lp·A: −(−1)·2 = 2, −(−0.5)·2 = 1, −(−2)·(−1) = −2, sum 1; penalty 0.025·(ln 4)² a token
    penalty = 0.025 * LN(4) ** 2
    assert plain.loss.item() == pytest.approx(1 / 3 + penalty, abs=1e-6)
    assert corrected.loss.item() == pytest.approx(2 / 3 + penalty, abs=1e-6)


def test_gspos_ratio_is_bounded() -> None:
    """A mean log-ratio of 12 is cut at 10: e^10 and not e^12."""
    made, _ = output(gspo, [math.e**12] * 3, advantages=(-1.0, -1.0), options={"clip": (0.5, 1e9)})
    assert made.ratio[1].item() == pytest.approx(math.e**10, rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "options", "low", "high"),
    [
        (cispo, {}, [False, False, True], [True, False, False]),  # bounds 0.8 and 1.28; cispo bounds whatever A is
        (dapo, {}, [False, False, True], [True, False, False]),  # a1: A > 0 above 1.28; b1: A < 0 below 0.8
        (dapo, {"dual_clip": 1.5}, [False, False, True], [True, False, False]),
    ],
)
def test_which_bound_binds(loss, options, low, high) -> None:
    made, _ = output(loss, [1.5, 1.0, 0.5], options=options)
    assert made.clipped_low[[1, 2, 4]].tolist() == low
    assert made.clipped_high[[1, 2, 4]].tolist() == high


def test_a_dual_clip_counts_as_the_upper_bound() -> None:
    """A < 0 and a ratio of 3 above the bound of 2: its gradient is gone."""
    made, gradient = output(dapo, [1.0, 1.0, 3.0], options={"dual_clip": 2.0})
    assert made.clipped_high[[1, 2, 4]].tolist() == [False, False, True]
    assert gradient[2] == 0
