"""Loss and gradient do not depend on the split, for every loss, average, KL and correction."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.loss import traits_of
from podium.loss.objective import Correction, Objective
from podium.records import Batch
from podium.settings.lookup import choices, find
from tests.loss.batches import a_batch


def random_batch(lengths: list[int], seed: int) -> Batch:
    random = torch.Generator().manual_seed(seed)
    batch = a_batch(lengths, [0.0] * len(lengths))
    mask = batch.loss_mask.double()

    def noise(scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(len(mask), generator=random, dtype=torch.float64)

    base = noise() - 2
    advantages = torch.randn(len(lengths), generator=random, dtype=torch.float64)
    return replace(
        batch,
        loss_mask=mask,
        advantages=advantages[batch.document_ids] * mask,
        old_logprobs=base + noise(0.2),
        rollout_logprobs=(base + noise(0.3)) * mask,
        reference_logprobs=base + noise(0.3),
    )


@pytest.mark.parametrize("name", choices("loss"))
@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=7),
    cut=st.integers(1, 6),
    seed=st.integers(0, 10_000),
    average=st.sampled_from(["tokens", "rollouts", 5]),
    estimator=st.sampled_from(["k1", "k2", "k3", "k4"]),
)
def test_loss_and_gradient_do_not_depend_on_the_split(name, lengths, cut, seed, average, estimator) -> None:
    loss = find("loss", name)
    objective = Objective(
        partial(loss),
        average=traits_of(loss).average or average,
        correction=Correction(level=traits_of(loss).correction_level),
        kl_beta=0.1,
        kl_estimator=estimator,
    )
    batch = random_batch(lengths, seed)
    cut = min(cut, len(lengths) - 1)
    border = int(batch.cu_seqlens[cut])
    start = batch.old_logprobs + 0.1
    whole, split = start.clone().requires_grad_(), start.clone().requires_grad_()
    of_whole = objective(whole, batch).loss
    of_parts = objective(split[:border], batch.documents(0, cut)).loss
    of_parts = of_parts + objective(split[border:], batch.documents(cut, len(lengths))).loss
    of_whole.backward()
    of_parts.backward()
    assert float(of_whole.detach()) == pytest.approx(float(of_parts.detach()), abs=1e-9)
    assert torch.allclose(whole.grad, split.grad, atol=1e-9)
    assert whole.grad[batch.loss_mask == 0].abs().sum() == 0


@pytest.mark.parametrize("name", choices("loss"))
def test_prompt_positions_never_enter_a_formula(name: str) -> None:
    """Whatever stands there, in any tensor, changes nothing."""
    loss = find("loss", name)
    objective = Objective(loss, average=traits_of(loss).average or "tokens", correction=Correction(), kl_beta=0.1)
    batch = random_batch([3, 2], 1)
    policy = batch.old_logprobs + 0.1
    prompt = batch.loss_mask == 0
    garbage = {
        key: torch.where(prompt, torch.full_like(policy, 7.0), getattr(batch, key))
        for key in ("old_logprobs", "rollout_logprobs", "reference_logprobs")
    }
    noisy = torch.where(prompt, torch.full_like(policy, -9.0), policy)
    assert float(objective(policy, batch).loss) == pytest.approx(
        float(objective(noisy, replace(batch, **garbage)).loss)
    )
