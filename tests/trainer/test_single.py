"""The trainer on the embedded model: split invariance, what is untouched, state that comes back whole."""

import asyncio
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from podium.errors import SharedPrefixError, SplitError, TokenMismatchError
from podium.loss import traits_of
from podium.loss.grpo import grpo
from podium.loss.objective import Correction, Objective
from podium.model import attention, fused
from podium.model.forward import PlacedBatch
from podium.model.load import load_policy
from podium.pack import Document, pack, to_batch
from podium.records import Batch, Group, Prompt, ReferenceSettings, Rollout, ids_digest
from podium.settings.lookup import choices, find
from podium.settings.tables import Model
from podium.trainer import single as single_module
from podium.trainer.single import Single
from tests.broken import own_denominator

TEXTS = ["37 + 48 = 85\n#### 85", "37 + 48 = 86", "1", "37 + 48 = 85\n#### 86"]
ADVANTAGES = [1.5, -0.5, -1.0, 0.25]


def a_trainer(
    *, lora: bool = False, loss=None, lr: float = 1e-3, reference=None, shared_prefix: bool = False, **options
) -> Single:
    section = Model.model_validate({"device": "cpu"} if lora else {"device": "cpu", "lora": False})
    policy = load_policy(section, seed=0)
    return Single(policy, loss or Objective(grpo), 10, reference, shared_prefix, lr=lr, **options)


def a_group(trainer: Single, number: int = 4) -> Group:
    """The first answers to one prompt."""
    tokenizer = trainer._policy.tokenizer
    rollouts = []
    for text in TEXTS[:number]:
        ids = (*tokenizer.encode(text), tokenizer.eos_token_id)
        rollouts.append(Rollout(ids, (-0.1,) * len(ids), (1,) * len(ids), "stop", text, 0, 0, 0, 0, ids_digest(ids)))
    prompt = Prompt(0, tuple(tokenizer.encode("<s>What is 37 + 48?\n")))
    return Group(prompt, tuple(rollouts), rewards=(1.0,) * number, advantages=tuple(ADVANTAGES[:number]))


def batches(trainer: Single, split: list[list[int]]) -> list[Batch]:
    """The four documents in the given batches."""
    group = a_group(trainer)
    documents = [Document(group.prompt, *pair) for pair in zip(group.rollouts, group.advantages, strict=True)]
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


@pytest.mark.parametrize("options", [{}, {"epochs_per_batch": 2}])
@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[3], [0, 1, 2]]])
def test_the_logprobs_of_each_rollout_are_those_before_the_update(split: list[list[int]], options: dict) -> None:
    trainer = a_trainer(**options)
    group = a_group(trainer)
    prompt = list(group.prompt.token_ids)
    before = {
        (0, rollout.digest): asyncio.run(trainer.score([*prompt, *rollout.token_ids]))[len(prompt) - 1 :]
        for rollout in group.rollouts
    }
    found = step(trainer, split).policy_logprobs
    assert set(found) == set(before)
    for key, logprobs in before.items():
        assert found[key] == pytest.approx(logprobs, abs=1e-5)


SEVERAL_UPDATES = [
    {"epochs_per_batch": 3},
    {"minibatches_per_step": 2},
    {"epochs_per_batch": 2, "minibatches_per_step": 2},
]


@pytest.mark.parametrize("old", ["auto", "rollout"])
@pytest.mark.parametrize("options", SEVERAL_UPDATES)
def test_the_mismatch_is_that_before_the_first_update(options: dict, old: str) -> None:
    """The policy moves far between the updates of a step, and its sampler is not to blame."""

    def taken(objective: Objective, **options) -> dict[str, float]:
        trainer = a_trainer(loss=objective, lr=1e-2, **options)
        group = a_group(trainer)
        groups = [group, replace(group, prompt=replace(group.prompt, ordinal=1))]
        made = pack(
            groups, max_tokens_per_batch=60, temperature=1.0, minibatches=options.get("minibatches_per_step", 1)
        )
        result = asyncio.run(trainer.step(made))
        assert result.metrics["optim/updates"] == math.prod(options.values())
        before = [gap for logprobs in result.policy_logprobs.values() for gap in logprobs]
        return {"logprobs": sum(before) / len(before)} | {
            name: value for name, value in result.metrics.items() if name.startswith("mismatch/")
        }

    objective = Objective(grpo, old=old)  # type: ignore[arg-type]
    assert taken(objective, **options) == pytest.approx(taken(objective), abs=1e-5)


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


def test_a_loss_that_divides_by_its_own_batch_is_caught() -> None:
    with pytest.raises(SplitError, match="num_loss_tokens"):
        step(a_trainer(loss=Objective(own_denominator)), [[0, 1, 2, 3]])


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_the_reference_is_the_model_as_it_was_or_follows_it(lora: bool, alpha: float) -> None:
    trainer = a_trainer(lora=lora, loss=Objective(grpo, kl_beta=0.1), reference=ReferenceSettings(alpha, every=2))
    [batch] = batches(trainer, [[0, 1, 2, 3]])
    first = trainer._snapshot(trainer._place(batch))
    steps = [step(trainer, [[0, 1, 2, 3]]) for _ in range(3)]
    assert steps[0].metrics["kl/k3"] == pytest.approx(0, abs=1e-9)  # nothing has moved yet
    assert steps[1].metrics["kl/k3"] > 1e-5
    now = trainer._reference.logprobs(trainer._place(batch))
    if alpha == 0:
        assert torch.allclose(now, first, atol=1e-6)
    else:  # after two steps it went half of the way
        assert not torch.allclose(now, first, atol=1e-3)
        assert not torch.allclose(now, trainer._snapshot(trainer._place(batch)), atol=1e-3)


def test_taking_the_reference_leaves_the_policy_as_it_is() -> None:
    for lora in (False, True):
        trainer = a_trainer(lora=lora, loss=Objective(grpo, kl_beta=0.1), reference=ReferenceSettings(0.5))
        step(trainer, [[0, 1, 2, 3]])
        before = trained(trainer)
        trainer._reference.logprobs(trainer._place(batches(trainer, [[0, 1, 2, 3]])[0]))
        assert all(torch.equal(before[name], p) for name, p in trainer._parameters.items())


def test_a_moving_reference_is_part_of_the_state() -> None:
    def fresh() -> Single:
        return a_trainer(lora=True, loss=Objective(grpo, kl_beta=0.1), reference=ReferenceSettings(0.3))

    unbroken, restored = fresh(), fresh()
    step(unbroken, [[0, 1, 2, 3]])
    restored.load_state(unbroken.state())
    for trainer in (unbroken, restored):
        step(trainer, [[0, 1], [2, 3]])
    one, other = unbroken.state(), restored.state()
    assert any(name.startswith("reference.") for name in one)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_several_updates_use_one_frozen_snapshot_of_the_old_logprobs() -> None:
    seen: list[torch.Tensor] = []

    def watching(policy, old, batch):
        seen.append(old.clone())
        return grpo(policy, old, batch)

    trainer = a_trainer(loss=Objective(watching), epochs_per_batch=3)
    result = step(trainer, [[0, 1, 2, 3]])
    whole = [old for old in seen if len(old) == len(seen[0])]
    assert all(torch.equal(old, whole[0]) for old in whole)
    assert result.metrics["optim/updates"] == 3
    assert result.metrics["loss/ratio_var"] > 0  # the later updates have moved away from the snapshot


def test_no_snapshot_is_taken_for_one_update(monkeypatch) -> None:
    monkeypatch.setattr(Single, "_snapshot", lambda *_: pytest.fail("a forward pass for nothing"))
    step(a_trainer(), [[0, 1, 2, 3]])


def test_minibatches_are_updates_of_their_own() -> None:
    """Two minibatches equal two steps with the same batches, the learning rate being constant."""
    one = a_trainer(minibatches_per_step=2)
    [left, right] = batches(one, [[0, 1], [2, 3]])
    totals = [int(batch.loss_mask.sum()) for batch in (left, right)]
    left = replace(left, num_loss_tokens=totals[0], num_rollouts=2, minibatch=0)
    right = replace(right, num_loss_tokens=totals[1], num_rollouts=2, minibatch=1)
    result = asyncio.run(one.step([left, right]))
    two = a_trainer()
    old = [two._snapshot(two._place(batch)) for batch in (left, right)]
    for batch, logprobs in zip((left, right), old, strict=True):
        asyncio.run(two.step([replace(batch, old_logprobs=logprobs)]))
    assert result.metrics["optim/updates"] == 2
    assert result.num_loss_tokens == sum(totals)
    for name, parameter in one._parameters.items():
        assert torch.allclose(parameter, two._parameters[name], atol=1e-7), name


def test_ids_that_were_not_sampled_are_caught() -> None:
    trainer = a_trainer()
    [batch] = batches(trainer, [[0, 1, 2, 3]])
    changed = batch.token_ids.clone()
    changed[-2] += 1
    with pytest.raises(TokenMismatchError, match="not the ones sampled"):
        asyncio.run(trainer.step([replace(batch, token_ids=changed)]))


@pytest.mark.parametrize("fails", [1, 2])
def test_out_of_memory_cuts_the_batches_and_gives_the_same_gradient(fails: int, monkeypatch) -> None:
    real, calls = single_module.policy_logprobs, []

    def tight(model, placed, dtype):
        """The first passes do not fit, the first of them after its backward pass has begun elsewhere."""
        calls.append(placed.batch.num_documents)
        if placed.batch.num_documents > 4 // 2**fails:
            raise torch.OutOfMemoryError("too large")
        return real(model, placed, dtype)

    clean = a_trainer()
    step(clean, [[0, 1, 2, 3]])
    monkeypatch.setattr(single_module, "policy_logprobs", tight)
    cut = a_trainer()
    result = step(cut, [[0, 1, 2, 3]])
    assert calls[: fails + 1] == [4, 2, 1][: fails + 1]
    assert result.updated
    assert result.metrics["pack/batches"] == 2**fails
    for name, parameter in clean._parameters.items():
        assert torch.allclose(parameter.grad, cut._parameters[name].grad, atol=1e-6), name
    calls.clear()
    step(cut, [[0, 1, 2, 3]])
    assert max(calls) <= 4 // 2**fails  # remembered: no second failure


def test_a_restored_trainer_cuts_its_batches_as_the_unbroken_one_does(monkeypatch) -> None:
    """The same cuts are the same order of float sums, so the same bits."""
    real, sizes = single_module.policy_logprobs, []

    def tight(model, placed, dtype):
        sizes.append(placed.batch.num_documents)
        if placed.batch.num_documents > 2:
            raise torch.OutOfMemoryError("too large")
        return real(model, placed, dtype)

    unbroken = a_trainer()
    monkeypatch.setattr(single_module, "policy_logprobs", tight)
    step(unbroken, [[0, 1, 2, 3]])
    saved = unbroken.state()
    sizes.clear()
    restored = a_trainer()
    restored.load_state(saved)
    for trainer in (unbroken, restored):
        step(trainer, [[0, 1, 2, 3]])
    assert sizes == [2, 2, 2, 2]  # no third pass that had to fail first
    one, other = unbroken.state(), restored.state()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_from_before_cuts_were_kept_starts_without_any() -> None:
    trainer = a_trainer()
    saved = {name: tensor for name, tensor in trainer.state().items() if name != "halvings"}
    trainer.load_state(saved)
    assert int(trainer.state()["halvings"]) == 0


def test_out_of_memory_in_the_second_batch_leaves_nothing_of_the_first_attempt(monkeypatch) -> None:
    real = single_module.policy_logprobs
    monkeypatch.setattr(
        single_module,
        "policy_logprobs",
        lambda model, placed, dtype: (
            (_ for _ in ()).throw(torch.OutOfMemoryError("x"))
            if placed.batch.num_documents > 2
            else real(model, placed, dtype)
        ),
    )
    cut, clean = a_trainer(), a_trainer()
    step(cut, [[0], [1, 2, 3]])  # the gradient of the first batch is there when the second fails
    monkeypatch.setattr(single_module, "policy_logprobs", real)
    step(clean, [[0], [1, 2, 3]])
    for name, parameter in clean._parameters.items():
        assert torch.allclose(parameter.grad, cut._parameters[name].grad, atol=1e-6), name


def test_a_single_document_that_does_not_fit_is_an_error(monkeypatch) -> None:
    def never(model, batch, dtype):
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(single_module, "policy_logprobs", never)
    with pytest.raises(torch.OutOfMemoryError):
        step(a_trainer(), [[0, 1, 2, 3]])


@pytest.mark.parametrize("lora", [False, True])
def test_gradient_checkpointing_gives_the_same_gradient(lora: bool) -> None:
    plain, checkpointed = a_trainer(lora=lora), a_trainer(lora=lora, gradient_checkpointing=True)
    for trainer in (plain, checkpointed):
        step(trainer, [[0, 1, 2, 3]])
    assert checkpointed._model.is_gradient_checkpointing
    for name, parameter in plain._parameters.items():
        assert torch.allclose(parameter.grad, checkpointed._parameters[name].grad, atol=1e-6), name


@pytest.mark.parametrize("lora", [False, True])
def test_bfloat16_products_change_the_gradient_by_little_and_the_weights_stay_float32(lora: bool) -> None:
    plain, half = a_trainer(lora=lora), a_trainer(lora=lora, precision="bfloat16")
    for trainer in (plain, half):
        step(trainer, [[0, 1, 2, 3]])
    assert all(p.dtype == torch.float32 for p in half._parameters.values())
    one, other = (torch.cat([p.grad.flatten() for p in trainer._parameters.values()]) for trainer in (plain, half))
    assert not torch.equal(one, other)
    assert float((one - other).norm() / one.norm()) < 0.1


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("options", [{}, {"epochs_per_batch": 2}, {"reference": ReferenceSettings(alpha=0.5)}])
def test_a_step_with_shared_prompts_is_the_plain_step(lora: bool, options: dict) -> None:
    loss = Objective(grpo, kl_beta=0.1 if "reference" in options else 0.0)
    plain, shared = (a_trainer(lora=lora, loss=loss, shared_prefix=on, **options) for on in (False, True))
    one, other = step(plain, [[0, 1], [2, 3]]), step(shared, [[0, 1], [2, 3]])
    assert other.metrics["pack/tokens"] < one.metrics["pack/tokens"]
    for name, value in one.metrics.items():
        if not name.startswith("pack/"):
            assert other.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-4), name
    for name, parameter in plain._parameters.items():
        assert torch.allclose(parameter.grad, shared._parameters[name].grad, atol=1e-5), name


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_shared_prompts_that_change_the_logprobs_are_caught_at_first_use(monkeypatch, precision: str) -> None:
    """Logprobs move by about 0.1, which rounding in bfloat16 does as well."""
    monkeypatch.setattr(attention, "keys_of_segments", lambda tokens, shared: tokens[shared.places] * 1.05)
    trainer = a_trainer(shared_prefix=True, precision=precision)
    before = trained(trainer)
    with pytest.raises(SharedPrefixError, match=r"set pack.shared_prefix = false"):
        step(trainer, [[0, 1, 2, 3]])
    assert all(torch.equal(before[name], p) for name, p in trainer._parameters.items())


@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own parts
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
def test_compiled_layers_give_the_same_gradient() -> None:
    plain = a_trainer(shared_prefix=True)
    compiled = a_trainer(shared_prefix=True, compile=True)
    for split in ([[0, 1, 2, 3]], [[0, 1], [2, 3]]):  # the second with other lengths than those compiled for
        step(plain, split)
        step(compiled, split)
        for name, parameter in plain._parameters.items():
            assert torch.allclose(parameter.grad, compiled._parameters[name].grad, atol=1e-5), name
    assert all(layer._compiled_call_impl is not None for layer in compiled._model.get_decoder().layers)


AVERAGED_LOSSES = [
    (name, average)
    for name in choices("loss")
    for average in ("tokens", "rollouts", 5)
    if traits_of(find("loss", name)).average in (None, average)
]


@pytest.mark.parametrize(("name", "average"), AVERAGED_LOSSES)
def test_a_spare_batch_adds_exactly_nothing(name: str, average: Any) -> None:
    """Whatever the loss: no bit of gradient or metrics, also not of the KL and the correction."""
    loss = find("loss", name)
    correction = Correction(traits_of(loss).correction_level)
    trainer = a_trainer(loss=Objective(loss, average, correction=correction, kl_beta=0.1))
    made = []
    for batch in pack([a_group(trainer, 2)], max_tokens_per_batch=99, temperature=1.0, ranks=3):
        placed = trainer._place(batch)
        near = trainer._snapshot(placed) + 0.01 * batch.loss_mask
        made.append(placed.with_fields(old_logprobs=near, reference_logprobs=near))
    assert [len(placed.row.loss_places) > 0 for placed in made] == [True, True, False]

    def gradients(batches: list[PlacedBatch]) -> tuple[dict[str, float], torch.Tensor]:
        metrics = trainer._gradients(batches, [])
        return metrics, torch.cat([p.grad.flatten() for p in trainer._parameters.values()])

    (without, gradient), (metrics, same) = gradients(made[:2]), gradients(made)
    assert metrics == without
    assert torch.equal(same, gradient)
    assert gradient.abs().sum() > 0
    metrics, nothing = gradients(made[2:])
    assert set(metrics.values()) == {0.0}
    assert nothing.abs().sum() == 0


@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_logprobs_that_are_not_finite_skip_the_step_too(poison: float, monkeypatch) -> None:
    """Whatever the check of the split makes of them."""
    real = single_module.policy_logprobs

    def poisoned(model, placed, dtype):
        logprobs, entropy = real(model, placed, dtype)
        return logprobs + placed.batch.loss_mask * poison, entropy

    trainer = a_trainer()
    before = trained(trainer)
    monkeypatch.setattr(single_module, "policy_logprobs", poisoned)
    result = step(trainer, [[0, 1, 2, 3]])
    assert not result.updated
    assert result.metrics["optim/skipped"] == 1
    assert all(torch.equal(before[name], p) for name, p in trainer._parameters.items())


@pytest.mark.parametrize("reference", [None, ReferenceSettings()])
def test_learned_cuts_hold_for_the_passes_before_the_first_update(reference, monkeypatch) -> None:
    real, sizes = single_module.policy_logprobs, []

    def noted(model, placed, dtype):
        sizes.append(placed.batch.num_documents)
        return real(model, placed, dtype)

    loss = Objective(grpo, kl_beta=0.1 if reference else 0.0)
    whole, cut = (a_trainer(loss=loss, reference=reference, epochs_per_batch=2) for _ in range(2))
    cut._halvings = 1
    one = step(whole, [[0, 1, 2, 3]])
    monkeypatch.setattr(single_module, "policy_logprobs", noted)
    other = step(cut, [[0, 1, 2, 3]])
    assert max(sizes) == 2
    assert other.metrics["loss/total"] == pytest.approx(one.metrics["loss/total"], rel=1e-4)


def test_the_step_runs_in_train_mode_and_the_engine_never_does(monkeypatch) -> None:
    real, modes = single_module.policy_logprobs, []

    def noted(model, placed, dtype):
        modes.append(model.training)
        return real(model, placed, dtype)

    monkeypatch.setattr(single_module, "policy_logprobs", noted)
    trainer = a_trainer(epochs_per_batch=2)
    step(trainer, [[0, 1, 2, 3]])
    assert modes == [False, True, True]  # the snapshot, then the updates
    assert not trainer._model.training


def test_a_reference_follows_every_so_many_steps_that_were_made() -> None:
    trainer = a_trainer(reference=ReferenceSettings(alpha=1.0, every=2), loss=Objective(grpo, kl_beta=0.1))
    first = {name: tensor.clone() for name, tensor in trainer._reference._copy.items()}
    step(trainer, [[0, 1, 2, 3]])
    assert all(torch.equal(first[name], tensor) for name, tensor in trainer._reference._copy.items())
    step(trainer, [[0, 1, 2, 3]])
    assert all(torch.equal(trainer._parameters[name], tensor) for name, tensor in trainer._reference._copy.items())


def test_layers_are_compiled_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "has_triton", lambda: True)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    models = [(cuda, torch.float32), (cuda, torch.bfloat16), (cpu, torch.float32), (cpu, torch.bfloat16)]
    compiled = [fused.is_compiled(SimpleNamespace(device=device, dtype=dtype)) for device, dtype in models]
    assert compiled == [True, True, False, False]
    monkeypatch.setattr(fused, "has_triton", lambda: False)
    assert not fused.is_compiled(SimpleNamespace(device=cuda, dtype=torch.float32))


def test_the_steps_statistics_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logprobs that differ from the sampler's by ln 1.05, ln 1.2 and ln 0.8, and from the reference's by 0.5."""
    gaps = [math.log(1.05), math.log(1.2), math.log(0.8)]
    trainer = a_trainer(loss=Objective(grpo, correction=Correction(sequence_band=None, band=1.22), kl_beta=0.1))
    [batch] = batches(trainer, [[0]])
    mask = torch.zeros_like(batch.loss_mask)
    places = batch.loss_mask.nonzero()[:3, 0]
    mask[places] = 1
    placed = trainer._place(replace(batch, loss_mask=mask, num_loss_tokens=3))
    logprobs = torch.zeros_like(mask).index_copy(0, places, torch.tensor(gaps) - 1.0).requires_grad_()
    rollout = torch.zeros_like(mask).index_copy(0, places, torch.full((3,), -1.0))
    placed = placed.with_fields(rollout_logprobs=rollout, reference_logprobs=(logprobs.detach() - 0.5) * mask)
    entropy = 2.0 * mask
    monkeypatch.setattr(trainer, "_logprobs", lambda _: (logprobs, entropy))
    metrics = trainer._gradients([placed], [])
    assert metrics["policy/entropy"] == pytest.approx(2.0)
    assert metrics["mismatch/outside_share"] == pytest.approx(2 / 3)  # 1.2 is above 1.1 and 0.8 below 0.9
    assert metrics["mismatch/masked_share"] == pytest.approx(1 / 3)  # 0.8 is below 1/1.22 = 0.82
    assert metrics["mismatch/abs_mean"] == pytest.approx(sum(map(abs, gaps)) / 3, abs=1e-6)
    assert (metrics["kl/k1"], metrics["kl/k2"]) == (pytest.approx(0.5, abs=1e-6), pytest.approx(0.125, abs=1e-6))
    assert metrics["kl/k3"] == pytest.approx(math.exp(-0.5) - 1 + 0.5, abs=1e-6)
