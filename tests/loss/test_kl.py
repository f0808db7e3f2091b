"""KL estimators, their gradients, and the KL folded into advantages, by hand."""

from dataclasses import replace

import pytest
import torch

from podium.loss.grpo import grpo
from podium.loss.objective import Objective, fold_into_advantages, kl_per_token
from tests.loss.batches import a_batch

# d = policy − reference = 0.5 and −1.0
POLICY, REFERENCE = [-1.0, -2.0], [-1.5, -1.0]


def alone(values: torch.Tensor) -> torch.Tensor:
    """The sum over one rank."""
    return values


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        ("k1", [0.5, -1.0], [1.0, 1.0]),
        ("k2", [0.125, 0.5], [0.5, -1.0]),
        # e^−0.5 − 1 + 0.5 = 0.1065307, e^1 − 1 − 1 = 0.7182818; gradient 1 − e^−d
        ("k3", [0.1065307, 0.7182818], [0.3934693, -1.7182818]),
        # r·d with r = 1: gradient r·d + r = d + 1
        ("k4", [0.5, -1.0], [1.5, 0.0]),
    ],
)
def test_estimators_by_hand(estimator, values, gradients) -> None:
    policy = torch.tensor(POLICY, requires_grad=True)
    found = kl_per_token(policy, policy.detach(), torch.tensor(REFERENCE), estimator)
    found.sum().backward()
    assert found.tolist() == pytest.approx(values, abs=1e-6)
    assert policy.grad.tolist() == pytest.approx(gradients, abs=1e-6)


def test_a_huge_distance_stays_finite() -> None:
    policy = torch.tensor([-500.0], requires_grad=True)
    kl_per_token(policy, policy.detach(), torch.tensor([0.0]), "k3").sum().backward()
    assert torch.isfinite(policy.grad).all()


def test_the_kl_term_is_averaged_like_the_loss_and_not_corrected() -> None:
    # one document, two answer tokens, A = 0: the loss is the KL alone: 0.1·(0.1065307 + 0.7182818)/2
    batch = replace(
        a_batch([2], [0.0]),
        reference_logprobs=torch.tensor([0.0, *REFERENCE]),
        rollout_logprobs=torch.tensor([0.0, -9.0, -9.0]),  # far off: a correction would make itself felt
    )
    policy = torch.tensor([0.0, *POLICY], requires_grad=True)
    made = Objective(grpo, kl_beta=0.1)(policy, batch)
    made.loss.backward()
    assert made.loss.item() == pytest.approx(0.1 * 0.8248125 / 2, abs=1e-6)
    assert made.kl_loss.item() == pytest.approx(made.loss.item())
    assert made.policy_loss.item() == 0
    assert policy.grad.tolist() == pytest.approx([0, 0.05 * 0.3934693, 0.05 * -1.7182818], abs=1e-6)
    assert made.drift.tolist() == pytest.approx([0, 0.5, -1.0])


def test_folded_into_advantages() -> None:
    # d = rollout − reference = 0.5, −1 | 2; mean over three tokens 0.5; A += 0.1·(0.5 − d)
    batch = replace(
        a_batch([2, 1], [1.0, -1.0]),
        rollout_logprobs=torch.tensor([0.0, -1.0, -2.0, 0.0, -1.0]),
        reference_logprobs=torch.tensor([0.0, -1.5, -1.0, 0.0, -3.0]),
    )
    [folded] = fold_into_advantages([batch], 0.1, alone)
    assert folded.advantages.tolist() == pytest.approx([0, 1.0, 1.15, 0, -1.15], abs=1e-6)


def test_the_mean_drift_is_that_of_the_whole_step_however_it_is_split() -> None:
    batch = replace(
        a_batch([2, 1], [1.0, -1.0]),
        rollout_logprobs=torch.tensor([0.0, -1.0, -2.0, 0.0, -1.0]),
        reference_logprobs=torch.tensor([0.0, -1.5, -1.0, 0.0, -3.0]),
    )
    parts = fold_into_advantages([batch.documents(0, 1), batch.documents(1, 2)], 0.1, alone)
    assert torch.cat([part.advantages for part in parts]).tolist() == pytest.approx(
        fold_into_advantages([batch], 0.1, alone)[0].advantages.tolist(), abs=1e-6
    )


def test_folding_leaves_the_loss_without_a_kl_term() -> None:
    batch = replace(a_batch([2], [0.0]), reference_logprobs=torch.tensor([0.0, *REFERENCE]))
    objective = Objective(grpo, kl_beta=0.1, kl_estimator="in_advantages")
    assert objective(torch.tensor([0.0, *POLICY]), batch).kl_loss.item() == 0
    assert objective.prepare([batch], alone)[0].advantages.abs().sum() > 0
    assert Objective(grpo, kl_beta=0.1).prepare([batch], alone) == [batch]


def test_the_mean_drift_is_over_the_tokens_of_all_minibatches() -> None:
    """Two updates of 2 and 1 loss tokens: the mean is over 3 and not over the first update's 2."""
    drift = {"rollout_logprobs": torch.tensor([0.0, -1.0, -2.0]), "reference_logprobs": torch.tensor([0.0, -1.5, -1.0])}
    first = replace(a_batch([2], [1.0]), **drift)
    second = replace(
        a_batch([1], [-1.0]),
        rollout_logprobs=torch.tensor([0.0, -1.0]),
        reference_logprobs=torch.tensor([0.0, -3.0]),
        minibatch=1,
    )
    folded = fold_into_advantages([first, second], 0.1, alone)
    # d = 0.5, −1 | 2, mean 0.5
    assert torch.cat([part.advantages for part in folded]).tolist() == pytest.approx([0, 1.0, 1.15, 0, -1.15], abs=1e-6)
