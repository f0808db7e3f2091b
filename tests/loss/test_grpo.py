"""Values and gradients against numbers worked by hand, and independence of the split."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.loss.grpo import grpo
from podium.records import Batch


def a_batch(lengths: list[int], advantages: list[float], **others) -> Batch:
    """Documents of 1 prompt token and `length` answer tokens each, with one advantage a document."""
    mask = torch.cat([torch.tensor([0.0] + [1.0] * length) for length in lengths])
    owners = torch.cat([torch.full((length + 1,), i) for i, length in enumerate(lengths)])
    starts = torch.tensor([0, *torch.tensor([length + 1 for length in lengths]).cumsum(0).tolist()], dtype=torch.int32)
    return Batch(
        token_ids=torch.zeros(len(mask), dtype=torch.long),
        position_ids=torch.cat([torch.arange(length + 1) for length in lengths]),
        document_ids=owners,
        cu_seqlens=starts,
        loss_mask=mask,
        advantages=torch.tensor(advantages)[owners] * mask,
        rollout_logprobs=torch.zeros(len(mask)),
        temperature=1.0,
        num_loss_tokens=sum(lengths),
        num_rollouts=len(lengths),
        answer_starts=(1,) * len(lengths),
        digests=("",) * len(lengths),
        **others,
    )


def loss_and_gradient(logprobs: list[float], batch: Batch, **options) -> tuple[float, list[float]]:
    policy = torch.tensor(logprobs, requires_grad=True)
    loss = grpo(policy, batch, **options).loss
    loss.backward()
    assert policy.grad is not None
    return loss.item(), policy.grad.tolist()


def test_with_one_update_the_gradient_is_minus_advantage_over_tokens() -> None:
    # two documents of 1 and 3 tokens, A = 2 and −1, r = 1: loss = −(2·1 − 1·3)/4 = 0.25
    # d loss / d lp_t = −A/4: −0.5 for the first document, 0.25 for the second; prompt tokens 0
    loss, gradient = loss_and_gradient([0.0, -0.7, 0.0, -0.1, -0.2, -0.3], a_batch([1, 3], [2.0, -1.0]))
    assert loss == pytest.approx(0.25, abs=1e-6)
    assert gradient == pytest.approx([0, -0.5, 0, 0.25, 0.25, 0.25], abs=1e-6)


def test_averaged_over_rollouts_every_answer_weighs_the_same() -> None:
    # loss = −(2·1 + (−1)·(3/3))/2 = −0.5; gradients −2/2 = −1 and 1/(3·2) = 1/6
    loss, gradient = loss_and_gradient(
        [0.0, -0.7, 0.0, -0.1, -0.2, -0.3], a_batch([1, 3], [2.0, -1.0]), average="rollouts"
    )
    assert loss == pytest.approx(-0.5, abs=1e-6)
    assert gradient == pytest.approx([0, -1.0, 0, 1 / 6, 1 / 6, 1 / 6], abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected_loss", "expected_gradient"),
    [
        # A > 0: −min(r, 1.28)·A; beyond 1.28 clipped, no gradient; below there is no lower clip
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.56, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        # A < 0: max(r, 0.8)·|A|; below 0.8 clipped, no gradient; above there is no upper clip
        (0.9, -2.0, 1.8, 1.8),
        (0.5, -2.0, 1.6, 0.0),
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_clipping(ratio: float, advantage: float, expected_loss: float, expected_gradient: float) -> None:
    # one token with lp − old = ln r; d(−r·A)/d lp = −r·A
    batch = a_batch([1], [advantage], old_logprobs=torch.tensor([0.0, -1.0]))
    loss, gradient = loss_and_gradient([0.0, -1.0 + math.log(ratio)], batch, clip_low=0.2, clip_high=0.28)
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    assert gradient == pytest.approx([0.0, expected_gradient], abs=1e-5)


def test_statistics_say_which_bound_took_the_gradient_away() -> None:
    old = torch.tensor([0.0, -1.0, -1.0, -1.0])
    policy = old + torch.tensor([0.0, math.log(1.5), math.log(0.5), math.log(0.5)])
    up = grpo(policy, a_batch([3], [1.0], old_logprobs=old))
    down = grpo(policy, a_batch([3], [-1.0], old_logprobs=old))
    assert up.clipped_high.tolist() == [False, True, False, False]
    assert not up.clipped_low.any()
    assert down.clipped_low.tolist() == [False, False, True, True]
    assert up.ratio[1:].tolist() == pytest.approx([1.5, 0.5, 0.5])


def test_an_explicit_clip_of_zero_stays_zero() -> None:
    batch = a_batch([1], [1.0], old_logprobs=torch.tensor([0.0, -1.0]))
    loss, gradient = loss_and_gradient([0.0, -0.9], batch, clip_high=0.0)
    assert loss == pytest.approx(-1.0, abs=1e-6)
    assert gradient == [0.0, 0.0]


def test_a_huge_ratio_stays_finite() -> None:
    batch = a_batch([1], [-1.0], old_logprobs=torch.tensor([0.0, -1000.0]))
    loss, _ = loss_and_gradient([0.0, -0.1], batch)
    assert loss == pytest.approx(math.exp(20), rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=8),
    cut=st.integers(1, 7),
    seed=st.integers(0, 1000),
    average=st.sampled_from(["tokens", "rollouts"]),
)
def test_loss_and_gradient_do_not_depend_on_the_split(lengths: list[int], cut: int, seed: int, average: str) -> None:
    cut = min(cut, len(lengths) - 1)
    random = torch.Generator().manual_seed(seed)
    advantages = torch.randn(len(lengths), generator=random, dtype=torch.float64)
    batch = a_batch(lengths, [0.0] * len(lengths))
    batch = replace(
        batch,
        loss_mask=batch.loss_mask.double(),
        advantages=advantages[batch.document_ids] * batch.loss_mask,
        old_logprobs=torch.randn(len(batch.token_ids), generator=random, dtype=torch.float64),
    )
    start = torch.randn(len(batch.token_ids), generator=random, dtype=torch.float64)
    whole, split = start.clone().requires_grad_(), start.clone().requires_grad_()
    of_whole = grpo(whole, batch, average=average).loss
    border = int(batch.cu_seqlens[cut])
    parts = [
        grpo(split[:border], batch.documents(0, cut), average=average).loss,
        grpo(split[border:], batch.documents(cut, len(lengths)), average=average).loss,
    ]
    of_whole.backward()
    sum(parts).backward()
    assert float(of_whole.detach()) == pytest.approx(float(sum(parts).detach()), abs=1e-9)
    assert torch.allclose(whole.grad, split.grad, atol=1e-9)
