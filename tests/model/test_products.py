from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from podium.engine.decoding.linear import AdaptedLinear
from podium.engine.inprocess import Inprocess
from podium.model import forward
from podium.model.forward import ExactLinear, exact_product, keep_exact_sums, products_dtype, sequence_logprobs
from podium.model.load import load_policy, twin_of
from podium.settings.tables import Model
from tests.model.test_attention import SHAPES, a_model

ROWS, WIDTH, OUT = 7, 32, 12
EXACT = {"o_proj", "down_proj"}


def a_layer(*, bias: bool) -> tuple[ExactLinear, torch.Tensor]:
    torch.manual_seed(0)
    return ExactLinear(WIDTH, OUT, bias=bias), torch.randn(2, ROWS, WIDTH, requires_grad=True)


@pytest.mark.parametrize("bias", [False, True])
def test_in_autocast_the_factors_are_rounded_and_the_sum_is_not(bias):
    layer, x = a_layer(bias=bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made, rounded = layer(x), linear(x, layer.weight, layer.bias)

    exact = linear(x.bfloat16().double(), layer.weight.bfloat16().double())
    if bias:
        exact = exact + layer.bias.double()
    assert made.dtype == torch.float32
    assert rounded.dtype == torch.bfloat16
    assert (made - exact).abs().max() < 1e-6
    assert (rounded - exact).abs().max() > 1e-4


def test_without_autocast_it_is_a_plain_layer():
    layer, x = a_layer(bias=True)
    assert torch.equal(layer(x), linear(x, layer.weight, layer.bias))
    half = layer.bfloat16()
    assert half(x.bfloat16()).dtype == torch.bfloat16


def test_without_autocast_it_calls_what_zero_3_puts_in_the_place_of_linear(monkeypatch):
    layer, x = a_layer(bias=True)
    called = []
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *given: called.append(given))
    layer(x)
    assert called == [(x, layer.weight, layer.bias)]


def test_gradients_are_those_of_the_rounded_factors():
    layer, x = a_layer(bias=True)
    arriving = torch.randn(2, ROWS, OUT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x).backward(arriving)

    halves = [tensor.detach().bfloat16().double() for tensor in (x, layer.weight, arriving)]
    of_x, of_weight = halves[2] @ halves[1], halves[2].flatten(0, 1).T @ halves[0].flatten(0, 1)
    assert x.grad is not None
    assert (x.grad - of_x).abs().max() < 2**-8 * of_x.abs().max()  # arrives in bfloat16, as in autocast
    assert layer.weight.grad is not None
    assert (layer.weight.grad - of_weight).abs().max() < 1e-5
    assert layer.bias.grad is not None
    assert torch.allclose(layer.bias.grad, arriving.sum((0, 1)), atol=1e-5)


def test_the_gradient_of_frozen_weights_is_not_computed(monkeypatch):
    layer, x = a_layer(bias=False)
    layer.weight.requires_grad_(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = layer(x).sum()
    asked = []
    monkeypatch.setattr(forward, "exact_product", lambda *factors: asked.append(factors))
    made.backward()
    assert not asked
    assert x.grad is not None


def test_compiled_it_computes_the_same():
    layer, x = a_layer(bias=False)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight))
        traced = torch.autograd.grad(compiled(x).square().sum(), (x, layer.weight))
    for one, other in zip(plain, traced, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_product_has_the_precision_of_its_sums(dtype):
    a, b = torch.randn(3, 5).to(dtype), torch.randn(5, 4).to(dtype)
    made = exact_product(a, b)
    assert made.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.allclose(made.double(), a.double() @ b.double(), atol=1e-5)


def test_of_a_model_the_layers_that_are_asked_for_keep_their_sums():
    model = a_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    keep_exact_sums(model)

    kinds = {name.rpartition(".")[2]: type(m) for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert {name for name, kind in kinds.items() if kind is ExactLinear} == EXACT
    assert kinds["q_proj"] is kinds["lm_head"] is torch.nn.Linear
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_with_an_adapter_beside_it_the_sum_of_both_is_not_rounded():
    layer, x = a_layer(bias=False)
    adapted = AdaptedLinear(layer, rank=2, scale=0.5)
    plain = AdaptedLinear(torch.nn.Linear(WIDTH, OUT), rank=2, scale=0.5)
    adapted.load(torch.randn(2, WIDTH), torch.randn(OUT, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = adapted(x)
        beside = linear(linear(x, adapted.a), adapted.b) * 0.5
        assert torch.equal(made, layer(x) + beside)
        assert made.dtype == torch.float32
        assert plain(x).dtype == torch.bfloat16


@pytest.mark.parametrize("lora", [False, {}])
def test_a_loaded_policy_does_not_round_the_sums_that_are_asked_for(lora):
    policy = load_policy(Model.model_validate({"device": "cpu", "lora": lora}), seed=0)
    seen: dict[str, set[torch.dtype]] = {}
    for name, module in policy.model.named_modules():
        last = name.rpartition(".")[2]
        if last.endswith("_proj"):
            module.register_forward_hook(lambda _, __, made, last=last: seen.setdefault(last, set()).add(made.dtype))
    sequence_logprobs(policy.model, [1, 2, 3], compute_dtype=torch.bfloat16)

    assert {name for name, dtypes in seen.items() if dtypes == {torch.float32}} == EXACT
    assert {name for name, dtypes in seen.items() if dtypes == {torch.bfloat16}} == seen.keys() - EXACT
    exact = {n.rpartition(".")[2] for n, module in policy.twin.named_modules() if isinstance(module, ExactLinear)}
    assert exact == EXACT


def test_bfloat16_weights_compute_what_the_same_weights_in_float32_compute():
    """In autocast. The residual stream is float32 from the embeddings on, so only norms and products round."""
    exact = load_policy(Model.model_validate({"device": "cpu"}), seed=0)
    with torch.no_grad():
        for name, parameter in exact.model.named_parameters():
            if "lora" not in name:
                parameter.copy_(parameter.bfloat16())
    half = load_policy(Model.model_validate({"device": "cpu", "dtype": "bfloat16"}), seed=0)
    seen: set[torch.dtype] = set()
    decoder: Any = half.model.get_decoder()
    hooks = [layer.register_forward_hook(lambda m, a, out: seen.add(out.dtype)) for layer in decoder.layers]
    ids = list(range(1, 40))
    found = sequence_logprobs(half.model, ids, compute_dtype=torch.bfloat16)
    expected = sequence_logprobs(exact.model, ids, compute_dtype=torch.bfloat16)
    for hook in hooks:
        hook.remove()
    assert seen == {torch.float32}
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 0.02


@pytest.mark.parametrize(
    ("precision", "weights", "expected"),
    [
        (None, torch.float32, None),
        ("float32", torch.float32, None),
        ("bfloat16", torch.float32, torch.bfloat16),
        (None, torch.bfloat16, torch.bfloat16),
    ],
)
def test_products_have_the_precision_that_the_settings_or_the_weights_say(precision, weights, expected):
    assert products_dtype(precision, weights) == expected


def test_the_engines_half_copies_with_an_adapter_compute_what_the_trainers_autocast_computes():
    policy = load_policy(Model.model_validate({"device": "cpu"}), seed=0)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.03)
    weights = dict(policy.named_weights())
    ranks = {name.removesuffix(".lora_A"): len(a) for name, a in weights.items() if name.endswith(".lora_A")}
    engine: Any = SimpleNamespace(_model=policy.twin, _compute_dtype=torch.bfloat16, _scale=policy.adapter_scale)
    Inprocess._halve(engine, ranks)
    for name in ranks:
        policy.twin.get_submodule(name).load(weights[f"{name}.lora_A"], weights[f"{name}.lora_B"])

    expected = sequence_logprobs(policy.model, list(range(1, 20)), compute_dtype=torch.bfloat16)
    assert sequence_logprobs(policy.twin, list(range(1, 20)), compute_dtype=torch.bfloat16) == expected


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_engines_half_copies_compute_what_the_trainers_autocast_computes(shape, bias):
    model: Any = a_model(shape)
    for layer in model.get_decoder().modules():
        if bias and isinstance(layer, torch.nn.Linear):
            layer.bias = torch.nn.Parameter(torch.randn(layer.out_features))
    keep_exact_sums(model)
    engine: Any = SimpleNamespace(_model=twin_of(model), _compute_dtype=torch.bfloat16, _scale=1.0)
    Inprocess._halve(engine, {})

    mlp = engine._model.get_submodule("model.layers.0.mlp")
    assert mlp.down_proj.weight.dtype == torch.bfloat16
    assert hasattr(mlp, "joined_gate_proj__and__up_proj")
    expected = sequence_logprobs(model, list(range(1, 20)), compute_dtype=torch.bfloat16)
    assert sequence_logprobs(engine._model, list(range(1, 20)), compute_dtype=torch.bfloat16) == expected
