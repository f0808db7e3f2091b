"""The fast training step on CUDA: compiled layers, shared prompts, no waiting for the device, memory as planned."""

import asyncio
import warnings
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch._inductor.cpu_vec_isa

from podium.loss.grpo import grpo
from podium.loss.objective import Objective
from podium.model.load import load_policy
from podium.pack import pack
from podium.records import Group, Prompt, Rollout, ids_digest
from podium.runtime.wiring.memory import memory_plan
from podium.settings.tables import Settings
from podium.trainer.single import Single
from tests.conftest import small_tables
from tests.model.test_attention import SHAPES, a_batch, a_model
from tests.model.test_shared_prefix import documents_of

from .test_cuda import gradients
from .test_decoding import policy_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler warns of its own parts
]


def groups_of(count: int, vocabulary: int = 50) -> list[Group]:
    made = []
    for ordinal in range(count):
        rollouts = []
        for index in range(4):
            ids = tuple((ordinal * 5 + index * 11 + 3 * i) % (vocabulary - 3) + 3 for i in range(5 + 3 * index))
            rollouts.append(
                Rollout(ids, (-3.9,) * len(ids), (1,) * len(ids), "stop", "", 0, 0, index, 0, ids_digest(ids))
            )
        prompt = Prompt(ordinal, tuple((ordinal + 2 * i) % (vocabulary - 3) + 3 for i in range(9 + ordinal % 3)))
        made.append(Group(prompt, tuple(rollouts), rewards=(0.0,) * 4, advantages=(1.0, -0.5, 0.25, -0.75)))
    return made


def a_trainer(model: Any, **options: Any) -> Single:
    return Single(policy_of(model), Objective(grpo), lr=1e-6, precision="bfloat16", **options)


def step(trainer: Single, groups: list[Group], budget: int, shared_prefix: bool = False) -> dict[str, float]:
    batches = pack(groups, max_tokens_per_batch=budget, temperature=1.0, shared_prefix=shared_prefix)
    result = asyncio.run(trainer.step(batches))
    assert result.updated
    return dict(result.metrics)


def flat_gradient(trainer: Single) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in trainer._parameters.values()])


@pytest.mark.parametrize("shape", SHAPES)
def test_shared_prompts_by_the_kernel_give_what_float32_gives(shape: str) -> None:
    model = a_model(shape).cuda()
    batch = a_batch(documents_of([(9, [6, 3, 8]), (4, [5, 12])]))
    exact, exact_gradient = gradients(model, batch, None)
    half, half_gradient = gradients(model, batch, torch.bfloat16, shared_prefix=True)
    assert float((half - exact).abs().max()) < 0.1
    assert float((half_gradient - exact_gradient).norm() / exact_gradient.norm()) < 0.05


@pytest.mark.parametrize("shared_prefix", [False, True])
def test_compiled_layers_give_the_gradient_of_plain_ones(shared_prefix: bool) -> None:
    plain, fast = a_trainer(a_model("qwen3"), compile=False), a_trainer(a_model("qwen3"), shared_prefix=shared_prefix)
    for count in (8, 5):
        one, other = step(plain, groups_of(count), 4096), step(fast, groups_of(count), 4096, shared_prefix)
        assert other["loss/total"] == pytest.approx(one["loss/total"], abs=2e-2)
        gap = (flat_gradient(plain) - flat_gradient(fast)).norm() / flat_gradient(plain).norm()
        assert float(gap) < 0.05


def test_nothing_is_compiled_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it would be, torch tries out for tens of seconds what the host's processor can do."""
    torch._dynamo.reset()  # what other tests compiled
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    monkeypatch.setattr(torch._inductor.cpu_vec_isa, "valid_vec_isa_list", lambda: pytest.fail("code for the host"))
    trainer = a_trainer(a_model("qwen3"))
    assert all(layer._compiled_call_impl is not None for layer in trainer._model.get_decoder().layers)
    step(trainer, groups_of(8), 4096)
    torch._dynamo.reset()
    step(a_trainer(a_model("qwen3"), compile=False), groups_of(8), 4096)


def test_no_micro_batch_waits_for_the_device() -> None:
    """As many waits in a step of many batches as in a step of one."""
    trainer = a_trainer(a_model("llama"), shared_prefix=True)
    groups = groups_of(12)
    waits = []
    for budget in 3 * (4096, 64):  # the first ones compile
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            metrics = step(trainer, groups, budget, shared_prefix=True)
            torch.cuda.set_sync_debug_mode("default")
        waits.append((metrics["pack/batches"], sum("synchronizing" in str(each.message) for each in caught)))
    few, many = waits[-2:]
    assert many[0] > 5 * few[0]
    transfers = 3  # a batch: one a kind of number
    assert many[1] - few[1] <= transfers * (many[0] - few[0]), waits


def test_a_step_needs_about_the_memory_that_was_planned(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.runtime.wiring.memory.is_compiled", lambda model: False)
    tables = small_tables(tmp_path / "run")
    tables["model"] = {"device": "cuda", "lora": False}
    tables["trainer"] = {"precision": "bfloat16"}
    settings = Settings.model_validate(tables)
    policy = load_policy(settings.model, seed=0)
    plan = memory_plan(settings, policy, 20)
    groups = [group for _ in range(40) for group in groups_of(50, policy.vocabulary)]
    trainer = Single(policy, Objective(grpo), lr=1e-6, precision="bfloat16", compile=False)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    batches = pack(groups, max_tokens_per_batch=1 << 20, temperature=1.0)
    asyncio.run(trainer.step(batches))
    tokens = sum(len(batch.token_ids) for batch in batches)
    real = torch.cuda.max_memory_allocated() - before
    planned = plan.per_token * tokens + plan.logits
    assert 0.4 * planned < real < 1.6 * planned, (real, planned)
