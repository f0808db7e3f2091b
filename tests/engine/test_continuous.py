"""Continuous batching over slots, run plainly on the CPU: the same answers as the reference path, however it is cut."""

import asyncio
import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from podium.engine._cuda import continuous as module
from podium.engine._cuda.continuous import Continuous
from podium.engine._cuda.joined import join_weights
from podium.engine._packed import PackedLinear
from podium.engine._small_trial import captured_gap, small_policy
from podium.engine.inprocess import Inprocess
from podium.model import attention
from podium.model.forward import sequence_logprobs
from podium.model.load import Policy, twin_of
from podium.model.memory import cache_elements_per_token
from podium.model.small_copy import small_copy
from podium.records import Answer, Request, Sampling
from tests.engine.test_inprocess import EOS, SAMPLING, generate, policy, requests
from tests.families import config_of
from tests.model.test_attention import SHAPES, a_model


def continuous(asked: list[Request], sampling: Sampling, concurrency: int = 512, made: Continuous | None = None):
    made = made or Continuous(policy().twin, concurrency, None)
    answers = [answer for some in made.generate(asked, sampling, lambda: 3) for answer in some]
    return {answer.key: answer for answer in answers}


def assert_same(found: dict[int, Answer], expected: list[Answer]) -> None:
    assert sorted(found) == [answer.key for answer in expected]
    for answer in expected:
        assert found[answer.key].token_ids == answer.token_ids
        assert found[answer.key].finish_reasons == answer.finish_reasons
        for mine, theirs in zip(found[answer.key].logprobs, answer.logprobs, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("concurrency", [1, 3, 8, 20, 512])
@pytest.mark.parametrize("steps_ahead", [1, 4, 50])
def test_it_writes_what_the_reference_path_writes(
    concurrency: int, steps_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots and prompts' places are taken again by others, batches shrink, ends are seen late."""
    monkeypatch.setattr(module, "STEPS_AHEAD", steps_ahead)
    expected = generate(Inprocess(policy()), requests(9), SAMPLING)
    assert_same(continuous(requests(9), SAMPLING, concurrency), expected)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=24, temperature=0, stop_ids=(EOS,)),
        Sampling(max_new_tokens=24, temperature=0.7, stop_ids=(EOS,)),
        Sampling(max_new_tokens=24, top_p=0.8, stop_ids=(EOS,)),
        Sampling(max_new_tokens=24, top_k=3),
        Sampling(max_new_tokens=1),
    ],
    ids=["greedy", "tempered", "top_p", "top_k", "one token"],
)
def test_it_draws_as_asked(sampling: Sampling) -> None:
    assert_same(continuous(requests(5), sampling, 8), generate(Inprocess(policy()), requests(5), sampling))


@pytest.mark.parametrize("shape", SHAPES)
def test_other_architectures(shape: str) -> None:
    """Grouped queries, normed queries, sliding windows shorter than prompt and answer."""
    model = a_model(shape)
    asked = [Request(k, tuple(range(3, 5 + 3 * k)), (k, k + 100)) for k in range(3)]
    answers = continuous(asked, Sampling(max_new_tokens=20), made=Continuous(twin_of(model), 4, None))
    for request in asked:
        for ids, logprobs in zip(answers[request.key].token_ids, answers[request.key].logprobs, strict=True):
            expected = sequence_logprobs(model, [*request.token_ids, *ids])[len(request.token_ids) - 1 :]
            assert logprobs == pytest.approx(expected, abs=1e-4)


def test_one_engine_serves_calls_of_different_sizes_one_after_the_other() -> None:
    made = Continuous(policy().twin, 16, None)
    for count, longest in ((2, 4), (9, 30), (1, 8)):
        sampling = Sampling(max_new_tokens=longest, stop_ids=(EOS,))
        expected = generate(Inprocess(policy()), requests(count), sampling)
        assert_same(continuous(requests(count), sampling, made=made), expected)


def test_a_prompt_goes_through_the_model_once_even_if_its_group_does_not_fit() -> None:
    rows = []
    model = twin_of(policy().model)
    hook = model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    continuous(requests(3, 20), SAMPLING, made=Continuous(model, 8, None))
    hook.remove()
    assert sum(columns for columns in rows if columns > 1) == sum(len(request.token_ids) for request in requests(3))


def test_fewer_rollouts_at_once_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = Continuous(policy().twin, 512, None)
    slots = roomy.reserve(requests(9, 8), SAMPLING).capacity.slots
    monkeypatch.setattr(module, "device_bytes", lambda device: 2e7)
    tight = Continuous(policy().twin, 512, None)
    step = tight.reserve(requests(9, 8), SAMPLING)
    assert step.capacity.slots < slots
    assert step.capacity.cache_bytes(4 * cache_elements_per_token(policy().twin), policy().vocabulary) <= 0.3 * 2e7
    assert_same(
        continuous(requests(9, 8), SAMPLING, made=tight), generate(Inprocess(policy()), requests(9, 8), SAMPLING)
    )


def test_given_up_in_the_middle_it_serves_the_next_call() -> None:
    made = Continuous(policy().twin, 8, None)
    answers = made.generate(requests(9), SAMPLING, lambda: 0)
    assert next(answers)
    answers.close()
    assert_same(continuous(requests(4), SAMPLING, made=made), generate(Inprocess(policy()), requests(4), SAMPLING))


def test_new_weights_are_used_at_once() -> None:
    model = a_model("llama")
    fresh = Policy(model, twin_of(model), None, None, (), 64, torch.device("cpu"), "")
    made = Continuous(fresh.twin, 8, None)
    asked = [Request(0, (5, 6, 7), (1, 2))]
    continuous(asked, SAMPLING, made=made)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    answer = continuous(asked, SAMPLING, made=made)[0]
    expected = sequence_logprobs(model, [5, 6, 7, *answer.token_ids[0]])[2:]
    assert answer.logprobs[0] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_joined_products_are_those_of_the_layers_one_by_one(shape: str) -> None:
    """And weights that are loaded layer by layer afterwards are in them."""
    model = a_model(shape)
    sampled = copy.deepcopy(model)
    join_weights(sampled)
    made = Continuous(sampled, 8, None)
    asked = [Request(0, (5, 6, 7), (1, 2))]
    for factor in (1.0, 1.3):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                dict(sampled.named_parameters())[name].copy_(parameter.mul_(factor))
        answer = continuous(asked, SAMPLING, made=made)[0]
        for ids, logprobs in zip(answer.token_ids, answer.logprobs, strict=True):
            assert logprobs == pytest.approx(sequence_logprobs(model, [5, 6, 7, *ids])[2:], abs=1e-4)


def test_weights_and_version_may_change_in_the_middle() -> None:
    model = a_model("llama")
    made, version = Continuous(twin_of(model), 8, None), [3]
    asked = [Request(k, (5, 6, 7 + k), tuple(range(4))) for k in range(4)]
    found: dict[int, Answer] = {}
    for some in made.generate(asked, Sampling(max_new_tokens=12), lambda: version[0]):
        found |= {answer.key: answer for answer in some}
        if version[0] == 3:
            version[0] = 4
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            made.take_weights()
    assert set(found[0].policy_versions) == {(3, 3)}
    assert set(found[3].policy_versions) == {(4, 4)}
    last = sequence_logprobs(model, [*asked[3].token_ids, *found[3].token_ids[0]])[2:]
    assert found[3].logprobs[0] == pytest.approx(last, abs=1e-4)


def test_a_call_beside_another_decodes_plainly_and_neither_disturbs_the_other() -> None:
    """Captured steps write to one set of slots; on them, two calls would write into each other's answers."""
    greedy = Sampling(max_new_tokens=6, temperature=0)
    engine = Inprocess(policy())
    engine._continuous, engine._is_compared = Continuous(engine._model, 512, None), True

    async def collect(asked: list[Request], sampling: Sampling) -> dict[int, Answer]:
        return {answer.key: answer async for answer in engine.generate(asked, sampling)}

    async def both() -> list[dict[int, Answer]]:
        return await asyncio.gather(collect(requests(9), SAMPLING), collect(requests(3), greedy))

    sampled, short = asyncio.run(both())
    assert_same(sampled, generate(Inprocess(policy()), requests(9), SAMPLING))
    assert_same(short, generate(Inprocess(policy()), requests(3), greedy))
    assert_same(asyncio.run(collect(requests(9), SAMPLING)), generate(Inprocess(policy()), requests(9), SAMPLING))


def test_the_cache_of_a_model_in_the_trainers_precision_can_be_counted() -> None:
    """Its layers are in bfloat16 and its states in float32, so it runs under autocast only."""
    model = copy.deepcopy(policy().twin)  # other tests share the policy
    for layer in model.modules():
        if type(layer) is torch.nn.Linear and layer is not model.get_output_embeddings():
            layer.to(torch.bfloat16)
    assert cache_elements_per_token(model, torch.bfloat16) == cache_elements_per_token(policy().twin)
    made = Continuous(model, 8, torch.bfloat16)
    answers = [answer for some in made.generate(requests(2), SAMPLING, lambda: 0) for answer in some]
    assert sorted(answer.key for answer in answers) == [0, 1]
    assert made.faults() == []


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_captured_steps_are_tried_on_a_small_copy_whose_layers_an_engine_has_packed(name: str) -> None:
    """Heads of 128 make layers large enough to be packed on a CPU, and packed layers cannot be copied."""
    config = config_of(name)
    config.head_dim, config.hidden_size = 128, 128 * config.num_attention_heads
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).eval()
    small, _ = small_copy(model)
    tried = small_policy(replace(policy(), model=model, twin=twin_of(model), peft=None, small=small))
    assert tried is not None
    Inprocess(tried)
    assert any(isinstance(layer, PackedLinear) for layer in tried.twin.modules())
    assert captured_gap(tried, 8) < 1e-3
