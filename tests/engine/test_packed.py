"""Packed layers compute what plain ones do, and the engine packs anew what a sync has changed."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from podium.engine.decoding.linear import PackedLinear, _can_pack, pack_layers, packed_weights
from podium.engine.inprocess import Inprocess
from podium.model.forward import sequence_logprobs
from podium.model.load import EMBEDDED, Policy, load_policy
from podium.records import Sampling
from podium.runtime.wiring.memory import memory_plan
from podium.settings.tables import Model
from tests.engine.test_inprocess import generate, group
from tests.runtime.test_memory import policy_of, settings_of

PROBE = list(range(3, 20))

pytestmark = pytest.mark.skipif(not _can_pack(), reason="this torch has no oneDNN")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose larger layers are packed and whose keys' and values' are too small for it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=384,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        attention_bias=True,
        tie_word_embeddings=True,
    )
    made = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config).save_pretrained(made)
    AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(made)
    return made


def a_policy(folder: Path, lora: Any = False) -> Policy:
    return load_policy(Model.model_validate({"name": str(folder), "device": "cpu", "lora": lora}), seed=0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 64, 200])
def test_a_packed_layer_computes_what_the_plain_one_does(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    layer = torch.nn.Linear(96, 160, bias=bias)
    x = torch.randn(rows, 3, 96)
    with torch.no_grad():
        assert torch.allclose(PackedLinear(layer)(x), layer(x), atol=1e-5)
        assert torch.allclose(PackedLinear(layer)(x[:, -1]), layer(x[:, -1]), atol=1e-5)  # not contiguous


def test_large_layers_are_packed_the_head_too_and_parameters_keep_their_names(folder: Path) -> None:
    policy = a_policy(folder)
    before = {name: id(parameter) for name, parameter in policy.twin.named_parameters()}
    pack_layers(policy.twin)
    kinds = {name: type(module) for name, module in policy.twin.named_modules() if hasattr(module, "in_features")}
    small = {name for name, kind in kinds.items() if kind is torch.nn.Linear}
    assert small == {f"model.layers.{i}.self_attn.{name}_proj" for i in range(2) for name in "kv"}
    assert kinds["lm_head"] is PackedLinear
    assert {name: id(parameter) for name, parameter in policy.twin.named_parameters()} == before
    assert not any(isinstance(module, PackedLinear) for module in policy.model.modules()), "the trainer's own"


def packed_in(policy: Policy) -> list[PackedLinear]:
    return [module for module in policy.twin.modules() if isinstance(module, PackedLinear)]


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("lora", [False, {"r": 4}])
def test_each_load_packs_the_weights_as_they_are_then(folder: Path, lora: Any, snapshot: bool) -> None:
    policy = a_policy(folder, lora)
    engine = Inprocess(policy, snapshot=snapshot)
    assert packed_in(policy)
    for version in range(3):
        with torch.no_grad():
            for parameter in policy.trained_parameters().values():
                parameter += 0.02 * torch.randn_like(parameter)
        asyncio.run(engine.load_weights(policy.named_weights(), version))
        assert_written_as_trained(engine, policy)


def assert_written_as_trained(engine: Inprocess, policy: Policy) -> None:
    """The logprobs of what it samples are the trainer's."""

    for answer in generate(engine, group(0, tuple(PROBE), (1, 2, 3), Sampling(max_new_tokens=8))):
        expected = sequence_logprobs(policy.model, [*PROBE, *answer.token_ids])[len(PROBE) - 1 :]
        assert answer.logprobs == pytest.approx(expected, abs=1e-4)
    assert asyncio.run(engine.score(PROBE)) == pytest.approx(sequence_logprobs(policy.model, PROBE), abs=1e-4)


def test_the_copies_are_in_the_memory_plan(folder: Path, tmp_path: Path) -> None:
    large = 4 * (2 * (2 * 384 * 384 + 3 * 384 * 512) + 512 * 384)  # two layers: q, o, gate, up, down; and the head
    small = 4 * 2 * 2 * 384 * 128  # k, v: where an adapter is merged, they are copied too

    def engine_copy(lora: Any, run: dict[str, Any], **engine: Any) -> tuple[int, int]:
        settings = settings_of(tmp_path, model={"name": str(folder), "lora": lora}, run=run, engine=engine)
        plan = memory_plan(settings, policy_of(settings), longest_prompt=20)
        return plan.engine_copy, plan.weights

    assert engine_copy(False, {})[0] == large
    assert engine_copy({"r": 4}, {})[0] == large + small
    copied, weights = engine_copy(False, {"sync_every": 2})
    assert copied == large + weights
    of_pools = {
        of: engine_copy(False, {}, name="pool", of=of, urls=[], replicas=[1, 3])[0] for of in (None, "vllm_local")
    }
    assert of_pools == {None: 3 * (weights + large), "vllm_local": 3 * weights}


def test_scores_and_rollouts_go_through_the_packed_head(folder: Path) -> None:
    """So the probe after a sync sees a head that was not packed anew."""
    policy = a_policy(folder)
    engine = Inprocess(policy)
    head: Any = policy.twin.get_output_embeddings()
    head.pack(head.weight * 1.5)
    found, trained = asyncio.run(engine.score(PROBE)), sequence_logprobs(policy.model, PROBE)
    assert max(abs(a - b) for a, b in zip(found, trained, strict=True)) > 1e-3
    asyncio.run(engine.load_weights(policy.named_weights(), 0))
    assert_written_as_trained(engine, policy)


def test_two_engines_over_one_twin_both_sample_from_what_either_loads(folder: Path) -> None:
    policy = a_policy(folder)
    first, second = Inprocess(policy), Inprocess(policy)
    with torch.no_grad():
        for parameter in policy.trained_parameters().values():
            parameter += 0.02 * torch.randn_like(parameter)
    asyncio.run(first.load_weights(policy.named_weights(), 1))
    assert_written_as_trained(first, policy)
    assert_written_as_trained(second, policy)


def test_trying_it_out_draws_no_random_numbers(folder: Path) -> None:
    policy = a_policy(folder)
    before = torch.get_rng_state()
    pack_layers(policy.twin)
    assert packed_in(policy)
    assert torch.equal(torch.get_rng_state(), before)


def broken(*args: Any) -> Any:
    raise RuntimeError("no such operator")


def wrong(x: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.zeros_like(x)


@pytest.mark.parametrize("operator", [broken, wrong])
def test_where_the_operators_are_not_what_they_were_nothing_is_packed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, operator: Callable[..., Any]
) -> None:
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: operator(x))
    policy = a_policy(folder)
    pack_layers(policy.twin)
    assert (packed_in(policy), packed_weights(policy.twin)) == ([], [])
    monkeypatch.undo()
    policy.twin.bfloat16()
    assert packed_weights(policy.twin) == [], "bfloat16 has other operators"
