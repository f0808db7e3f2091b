"""The trainer on the embedded model: split invariance, what is untouched, state that comes back whole."""

import asyncio
import math
from dataclasses import replace

import pytest
import torch

from podium.errors import SplitError, TokenMismatchError
from podium.loss.grpo import grpo
from podium.model.load import load_policy
from podium.pack import Document, to_batch
from podium.records import Batch, LossOutput, Prompt, Rollout, ids_digest
from podium.settings import Model
from podium.trainer._optimizer import warmed_up
from podium.trainer.single import Single

TEXTS = ["37 + 48 = 85\n#### 85", "37 + 48 = 86", "1", "37 + 48 = 85\n#### 86"]
ADVANTAGES = [1.5, -0.5, -1.0, 0.25]


def a_trainer(*, lora: bool = False, loss=grpo, lr: float = 1e-3, **options) -> Single:
    section = Model.model_validate({"device": "cpu"} if lora else {"device": "cpu", "lora": False})
    return Single(load_policy(section, seed=0), loss, lr=lr, **options)


def batches(trainer: Single, split: list[list[int]]) -> list[Batch]:
    """The four documents in the given batches."""
    tokenizer = trainer._policy.tokenizer
    prompt = Prompt(0, tuple(tokenizer.encode("<s>What is 37 + 48?\n")))
    documents = []
    for text, advantage in zip(TEXTS, ADVANTAGES, strict=True):
        ids = (*tokenizer.encode(text), tokenizer.eos_token_id)
        rollout = Rollout(ids, (-0.1,) * len(ids), (1,) * len(ids), "stop", text, 0, 0, 0, 0, ids_digest(ids))
        documents.append(Document(prompt, rollout, advantage))
    tokens = sum(len(document.rollout.token_ids) for document in documents)
    return [
        to_batch([documents[i] for i in part], num_loss_tokens=tokens, num_rollouts=4, temperature=1.0)
        for part in split
    ]


def step(trainer: Single, split: list[list[int]]):
    return asyncio.run(trainer.step(batches(trainer, split)))


def trained(trainer: Single) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer._parameters.items()}


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("split", [[[0, 1], [2, 3]], [[3], [0, 1, 2]], [[0], [1], [2], [3]], [[2, 0, 3, 1]]])
def test_the_gradient_and_metrics_do_not_depend_on_the_split(lora: bool, split: list[list[int]]) -> None:
    whole, parts = a_trainer(lora=lora), a_trainer(lora=lora)
    one, other = step(whole, [[0, 1, 2, 3]]), step(parts, split)
    for name, parameter in whole._parameters.items():
        assert torch.allclose(parameter.grad, parts._parameters[name].grad, atol=1e-6), name
    for name, value in one.metrics.items():
        if not name.startswith("pack/"):
            assert other.metrics[name] == pytest.approx(value, abs=1e-5), name


def test_answers_that_beat_their_group_become_more_likely() -> None:
    trainer = a_trainer(lr=1e-5)
    [batch] = batches(trainer, [[0, 1, 2, 3]])
    document = batch.documents(0, 1)
    ids = document.token_ids.tolist()
    before = sum(asyncio.run(trainer.score(ids))[document.answer_starts[0] - 1 :])
    asyncio.run(trainer.step([batch]))
    assert sum(asyncio.run(trainer.score(ids))[document.answer_starts[0] - 1 :]) > before


def test_no_batch_makes_no_update() -> None:
    trainer = a_trainer()
    before = trained(trainer)
    result = asyncio.run(trainer.step([]))
    assert not result.updated
    assert all(torch.equal(before[name], p) for name, p in trainer._parameters.items())


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_leaves_weights_and_optimizer_untouched(poison: float) -> None:
    trainer = a_trainer()
    step(trainer, [[0, 1, 2, 3]])
    before = trainer.state()
    [batch] = batches(trainer, [[0, 1, 2, 3]])
    poisoned = batch.advantages.clone()
    poisoned[-1] = poison
    result = asyncio.run(trainer.step([replace(batch, advantages=poisoned)]))
    assert not result.updated
    assert result.metrics["optim/skipped"] == 1
    after = trainer.state()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_under_lora_only_the_adapter_trains() -> None:
    trainer = a_trainer(lora=True)
    assert all("lora_" in name for name in trainer._parameters)
    base = {n: p.clone() for n, p in trainer._model.named_parameters() if "lora_" not in n}
    step(trainer, [[0, 1, 2, 3]])
    assert all(torch.equal(base[n], p) for n, p in trainer._model.named_parameters() if "lora_" not in n)
    assert any(name.endswith("lora_B.default.weight") and p.abs().sum() > 0 for name, p in trainer._parameters.items())


@pytest.mark.parametrize("lora", [False, True])
def test_a_restored_trainer_goes_on_bit_for_bit(lora: bool) -> None:
    unbroken = a_trainer(lora=lora)
    step(unbroken, [[0, 1, 2, 3]])
    saved = unbroken.state()
    step(unbroken, [[0, 1], [2, 3]])
    restored = a_trainer(lora=lora)
    restored.load_state(saved)
    step(restored, [[0, 1], [2, 3]])
    one, other = unbroken.state(), restored.state()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_large_gradients_are_scaled_to_the_limit() -> None:
    trainer = a_trainer(max_grad_norm=1e-3)
    result = step(trainer, [[0, 1, 2, 3]])
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in trainer._parameters.values()))
    assert result.metrics["optim/grad_norm"] > 1e-2
    assert norm == pytest.approx(1e-3, rel=1e-3)


def test_warm_up_rises_in_equal_parts() -> None:
    # 1e-3 over 4 updates: a quarter, a half, three quarters, all of it
    assert [warmed_up(1e-3, update, 4) for update in range(6)] == pytest.approx(
        [0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3]
    )
    assert warmed_up(1e-3, 0, 0) == 1e-3


def test_mismatch_is_measured_against_the_sampler() -> None:
    trainer = a_trainer()
    [batch] = batches(trainer, [[0, 1, 2, 3]])
    result = asyncio.run(trainer.step([batch]))
    fresh = a_trainer()
    gaps = []
    for number in range(4):
        document = batch.documents(number, number + 1)
        scores = asyncio.run(fresh.score(document.token_ids.tolist()))[document.answer_starts[0] - 1 :]
        gaps += [score + 0.1 for score in scores]  # the sampler's logprobs are −0.1 throughout
    assert result.metrics["mismatch/abs_mean"] == pytest.approx(sum(map(abs, gaps)) / len(gaps), abs=1e-4)
    assert result.metrics["mismatch/k1"] == pytest.approx(-sum(gaps) / len(gaps), abs=1e-4)
    k3 = sum(math.exp(gap) - 1 - gap for gap in gaps) / len(gaps)
    assert result.metrics["mismatch/k3"] == pytest.approx(k3, abs=1e-4)


def mean_over_the_batch_at_hand(policy_logprobs: torch.Tensor, batch: Batch) -> LossOutput:
    """The classic mistake: each micro-batch divides by its own tokens."""
    right = grpo(policy_logprobs, batch)
    return replace(right, loss=right.loss * batch.num_loss_tokens / batch.loss_mask.sum())


def test_a_loss_that_divides_by_its_own_batch_is_caught() -> None:
    with pytest.raises(SplitError, match="num_loss_tokens"):
        step(a_trainer(loss=mean_over_the_batch_at_hand), [[0, 1, 2, 3]])


def test_ids_that_were_not_sampled_are_caught() -> None:
    trainer = a_trainer()
    [batch] = batches(trainer, [[0, 1, 2, 3]])
    changed = batch.token_ids.clone()
    changed[-2] += 1
    with pytest.raises(TokenMismatchError, match="not the ones sampled"):
        asyncio.run(trainer.step([replace(batch, token_ids=changed)]))
