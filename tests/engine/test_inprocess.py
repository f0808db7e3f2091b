"""The in-process engine on the real embedded model."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from statistics import fmean
from typing import Any

import pytest
import torch

from podium.engine.cuda.captured import CapturedDecoder
from podium.engine.decoding.linear import Joined
from podium.engine.decoding.queue import decode_now
from podium.engine.inprocess import Inprocess, PlainDecoder, widen
from podium.errors import InputError
from podium.model.device_thread import SHARED
from podium.model.evidence import difference
from podium.model.forward import sequence_logprobs
from podium.model.load import Policy, load_policy, twin_of
from podium.records import Answer, PrefixGroup, Request, Sampling
from podium.settings.tables import Model
from tests.model.test_attention import SHAPES, a_model

EOS = 2


@lru_cache
def policy() -> Policy:
    return load_policy(Model.model_validate({"device": "cpu", "lora": False}), seed=0)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(policy().tokenizer.encode(f"<s>{text}\n"))


SAMPLING = Sampling(max_new_tokens=24, stop_ids=(EOS,))


def group(name: int, token_ids: tuple[int, ...], seeds: Iterable[int], sampling: Sampling = SAMPLING) -> list[Request]:
    """The requests of one prompt, one per seed."""
    seeds = tuple(seeds)
    return [Request(token_ids, sampling, seed, PrefixGroup(f"train/{name}", len(seeds))) for seed in seeds]


def requests(count: int = 5, rollouts: int = 4, sampling: Sampling = SAMPLING) -> list[Request]:
    """Rollouts of prompts of different lengths."""
    texts = ["What is 37 + 48?", "What is 10 - 99?", "37 + 48", "What is 12 + 13? Please.", "2"]
    groups = [group(k, ids_of(texts[k % 5]), range(k * 100, k * 100 + rollouts), sampling) for k in range(count)]
    return [request for each in groups for request in each]


def generate(engine: Inprocess, asked: list[Request]) -> list[Answer]:
    async def run() -> list[Answer]:
        return list(await asyncio.gather(*(engine.generate(request) for request in asked)))

    return asyncio.run(run())


def assert_scored(model: Any, asked: list[Request], answers: list[Answer]) -> None:
    """The sampled logprobs are those of a plain forward pass."""
    for request, answer in zip(asked, answers, strict=True):
        expected = sequence_logprobs(model, [*request.token_ids, *answer.token_ids])[len(request.token_ids) - 1 :]
        assert answer.logprobs == pytest.approx(expected, abs=1e-4)


def test_sampled_logprobs_equal_the_trainers() -> None:
    assert_scored(policy().model, requests(), generate(Inprocess(policy()), requests()))


@pytest.mark.parametrize("shape", SHAPES)
def test_sampled_logprobs_equal_the_trainers_for_other_architectures(shape: str) -> None:
    """Grouped queries, normed queries, sliding windows shorter than the answer."""
    model = a_model(shape)
    other = Policy(model, twin_of(model), None, None, (), 64, torch.device("cpu"), "")
    twenty = Sampling(max_new_tokens=20)
    asked = [each for k in range(3) for each in group(k, tuple(range(3, 5 + 3 * k)), (k, k + 100), twenty)]
    assert_scored(model, asked, generate(Inprocess(other), asked))


@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_logprobs_are_tempered(temperature: float) -> None:
    sampling = Sampling(max_new_tokens=6, temperature=temperature, stop_ids=(EOS,))
    [answer] = generate(Inprocess(policy()), requests(1, 1, sampling))
    prompt = requests(1)[0].token_ids
    with torch.no_grad():
        all_ = policy().twin(torch.tensor([[*prompt, *answer.token_ids]])).logits[0] / temperature
    expected = [float(all_[len(prompt) - 1 + t].log_softmax(-1)[token]) for t, token in enumerate(answer.token_ids)]
    assert answer.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("concurrency", [1, 3, 4, 9, 512])
def test_rollouts_do_not_depend_on_how_many_are_written_at_once(concurrency: int) -> None:
    """Slots leave, join and are moved; each rollout stays what its seed makes it."""
    expected = generate(Inprocess(policy()), requests(9))
    found = generate(Inprocess(policy(), concurrency=concurrency), requests(9))
    assert_same(found, expected)


def assert_same(found: list[Answer], expected: list[Answer]) -> None:
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    for a, b in zip(found, expected, strict=True):
        assert a.finish_reason == b.finish_reason
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


MIXED = [
    Sampling(max_new_tokens=24, stop_ids=(EOS,)),
    Sampling(max_new_tokens=9, temperature=0, stop_ids=(EOS,)),
    Sampling(max_new_tokens=17, temperature=0.7, stop_ids=(EOS, 22)),
    Sampling(max_new_tokens=24, top_p=0.8, stop_ids=(EOS,)),
    Sampling(max_new_tokens=5, top_k=3),
    Sampling(max_new_tokens=1),
]


def mixed() -> list[Request]:
    """Each rollout of a group with a sampling of its own."""
    return [replace(each, sampling=MIXED[k % len(MIXED)]) for k, each in enumerate(requests(9))]


def test_each_request_is_answered_by_its_own_sampling_whatever_is_written_beside_it() -> None:
    engine = Inprocess(policy())
    alone = [generate(engine, [request])[0] for request in mixed()]
    assert_same(generate(Inprocess(policy(), concurrency=10), mixed()), alone)


def test_a_cancelled_request_leaves_the_others_as_they_are() -> None:
    engine, asked = Inprocess(policy()), requests(4, 4, Sampling(max_new_tokens=60))
    expected = generate(engine, asked)

    async def run() -> list[Answer]:
        calls = [asyncio.create_task(engine.generate(request)) for request in asked]
        await asyncio.sleep(0.01)
        for call in calls[::3]:
            call.cancel()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended[::3])
        return [each for each in ended if isinstance(each, Answer)]

    assert_same(asyncio.run(run()), [answer for k, answer in enumerate(expected) if k % 3])
    assert_same(generate(engine, asked), expected)  # nothing of the cancelled ones is left


def test_a_listener_hears_every_token_once_and_in_order() -> None:
    heard: list[list[int]] = []
    [request] = requests(1, 1, Sampling(max_new_tokens=30))
    answer = asyncio.run(Inprocess(policy()).generate(request, lambda ids: heard.append(list(ids))))
    assert [i for some in heard for i in some] == list(answer.token_ids)
    assert len(heard) > 1


def test_a_listener_that_fails_fails_its_own_request_only() -> None:
    engine, asked = Inprocess(policy()), requests(2, 2)

    def fail(ids: Any) -> None:
        raise ValueError("a listener's own")

    async def run() -> list[Any]:
        calls = [engine.generate(asked[0], fail), *(engine.generate(request) for request in asked[1:])]
        return list(await asyncio.gather(*calls, return_exceptions=True))

    first, *others = asyncio.run(run())
    assert isinstance(first, ValueError)
    assert_same(others, generate(engine, asked)[1:])


def test_what_fails_on_the_device_fails_every_request_and_the_next_ones_work(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Inprocess(policy())
    expected = generate(engine, requests())
    with monkeypatch.context() as broken:
        broken.setattr(PlainDecoder, "_advance", lambda *_: 1 / 0)

        async def run() -> list[Any]:
            return list(await asyncio.gather(*map(engine.generate, requests()), return_exceptions=True))

        assert {type(each) for each in asyncio.run(run())} == {ZeroDivisionError}
    assert_same(generate(engine, requests()), expected)


def test_requests_that_arrive_later_join_the_batch() -> None:
    rows = []
    engine = Inprocess(policy())
    hook = engine._model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )

    async def run() -> None:
        first = asyncio.create_task(engine.generate(requests(1, 1, Sampling(max_new_tokens=400))[0]))
        while not rows:
            await asyncio.sleep(0.001)
        await asyncio.gather(first, *(engine.generate(each) for each in requests(2, 3)[1:]))

    try:
        asyncio.run(run())
    finally:
        hook.remove()
    assert (6, 1) in rows  # one step serves both callers


def test_greedy_equals_transformers_generate() -> None:
    greedy = Sampling(max_new_tokens=24, temperature=0, stop_ids=(EOS,))
    answers = generate(Inprocess(policy()), requests(5, 1, greedy))
    for request, answer in zip(requests(5, 1), answers, strict=True):
        prompt = torch.tensor([request.token_ids])
        out = policy().twin.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
        assert list(answer.token_ids) == out[0, prompt.shape[1] :].tolist()


def test_the_stop_token_is_kept_and_nothing_after_it() -> None:
    answers = generate(Inprocess(policy()), requests(9, 8, Sampling(max_new_tokens=40, stop_ids=(EOS,))))
    stopped = [answer.token_ids for answer in answers if answer.finish_reason == "stop"]
    assert stopped
    assert all(ids[-1] == EOS and EOS not in ids[:-1] for ids in stopped)
    assert len({len(ids) for ids in stopped}) > 1  # they ended at different moments of one batch


def test_an_answer_that_is_too_long_is_cut_and_says_so() -> None:
    answers = generate(Inprocess(policy()), requests(1, 4, Sampling(max_new_tokens=3, stop_ids=(EOS,))))
    assert [(len(answer.token_ids), answer.finish_reason) for answer in answers] == [(3, "length")] * 4


def test_a_stop_token_in_the_last_place_is_a_stop() -> None:
    newline = policy().tokenizer.encode("\n")[0]
    [answer] = generate(Inprocess(policy()), requests(1, 1, Sampling(max_new_tokens=200, stop_ids=(newline,))))
    length = len(answer.token_ids)
    [again] = generate(Inprocess(policy()), requests(1, 1, Sampling(max_new_tokens=length, stop_ids=(newline,))))
    assert again.finish_reason == "stop"
    assert again.token_ids == answer.token_ids


def test_no_stop_ids_means_length_only() -> None:
    answers = generate(Inprocess(policy()), requests(1, 4, Sampling(max_new_tokens=30)))
    assert [len(answer.token_ids) for answer in answers] == [30] * 4


def test_the_prompt_of_a_group_goes_through_the_model_once() -> None:
    engine = Inprocess(policy())
    rows = []
    hook = (
        policy()
        .twin.get_decoder()
        .register_forward_pre_hook(
            lambda module, args, kwargs: rows.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
    )
    try:
        generate(engine, requests(3, 8))
    finally:
        hook.remove()
    assert rows[0][0] == 3  # three prompts for 24 rollouts
    assert all(columns == 1 for _, columns in rows[1:])


def test_finished_rollouts_leave_the_batch() -> None:
    rows = []
    hook = (
        policy()
        .twin.get_decoder()
        .register_forward_pre_hook(
            lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[0]), with_kwargs=True
        )
    )
    engine = Inprocess(policy())
    rows.clear()
    try:
        generate(engine, requests(9, 8, Sampling(max_new_tokens=60, stop_ids=(EOS,))))
    finally:
        hook.remove()
    assert rows[1] == 72
    assert rows[-1] < 72


def test_positions_never_pass_the_end_of_an_answer() -> None:
    """A slot that has ended may stay in the batch while others join; it must not march on past the context."""
    largest = []
    engine = Inprocess(policy(), concurrency=8)
    hook = engine._model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: largest.append(int(kwargs["position_ids"].max())), with_kwargs=True
    )
    try:
        generate(engine, requests(9, 4))
    finally:
        hook.remove()
    assert max(largest) < max(len(request.token_ids) for request in requests(9)) + 24


def test_prompts_of_one_token_and_answers_of_one_token() -> None:
    one = Sampling(max_new_tokens=1, stop_ids=(EOS,))
    asked = [each for k in range(3) for each in group(k, (40 + k,), (k, k + 9), one)]
    assert [len(answer.token_ids) for answer in generate(Inprocess(policy()), asked)] == [1] * 6


def test_a_model_that_it_cannot_decode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PlainDecoder.logits
    monkeypatch.setattr(PlainDecoder, "logits", lambda self, hidden: real(self, hidden) * 1.1)
    with pytest.raises(InputError, match="cannot decode this architecture"):
        Inprocess(policy())


def half_policy(**tables: Any) -> Policy:
    return load_policy(Model.model_validate({"device": "cpu", "dtype": "bfloat16", **tables}), seed=0)


def test_an_adapter_over_bfloat16_is_not_merged() -> None:
    half = half_policy()
    engine = Inprocess(half)
    asyncio.run(engine.load_weights(half.named_weights(), 0))
    probe = list(requests(1)[0].token_ids)
    before = asyncio.run(engine.score(probe))
    with torch.no_grad():
        for name, parameter in half.model.named_parameters():
            if "lora_B" in name:
                parameter.add_(1e-3)  # merged into bfloat16 weights, most of this would round away
    asyncio.run(engine.load_weights(half.named_weights(), 1))
    assert asyncio.run(engine.score(probe)) != before
    assert asyncio.run(engine.score(probe)) == sequence_logprobs(half.model, probe, compute_dtype=torch.bfloat16)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj", "down_proj"]])
def test_a_base_in_bfloat16_exists_once(targets: Any) -> None:
    """Every weight that the engine reads, apart from the adapter, is the trainer's, also after a push."""
    half = half_policy(lora={"r": 3, "targets": targets})
    values = {name: parameter.clone() for name, parameter in half.model.named_parameters()}
    engine = Inprocess(half, snapshot=True)
    asyncio.run(engine.load_weights(half.named_weights(), 0))
    assert all(torch.equal(parameter, values[name]) for name, parameter in half.model.named_parameters())
    trained = dict(half.model.named_parameters())
    for name, parameter in engine._model.named_parameters():
        layer, _, kind = name.rpartition(".")
        mine = trained.get(name, trained.get(f"{layer}.base_layer.{kind}"))
        assert mine is not None
        assert mine.data_ptr() == parameter.data_ptr(), name
    joined = [module for module in engine._model.modules() if isinstance(module, Joined)]
    own = {tensor.untyped_storage().data_ptr() for tensor in half.model.parameters()}
    assert joined
    assert all(module.weight.untyped_storage().data_ptr() in own for module in joined)


def test_over_bfloat16_a_snapshot_keeps_the_adapter_of_its_push() -> None:
    half = half_policy()
    engine = Inprocess(half, snapshot=True)
    asyncio.run(engine.load_weights(half.named_weights(), 0))
    probe = list(requests(1)[0].token_ids)
    before = asyncio.run(engine.score(probe))
    with torch.no_grad():
        for name, parameter in half.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(7))
    assert asyncio.run(engine.score(probe)) == before
    asyncio.run(engine.load_weights(half.named_weights(), 1))
    assert asyncio.run(engine.score(probe)) == sequence_logprobs(half.model, probe, compute_dtype=torch.bfloat16)
    assert difference(half.named_weights(), asyncio.run(engine.held()), half.adapter_scale) is None


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj", "down_proj"]])
@pytest.mark.parametrize("size", [0.0, 0.02, 0.3])
def test_captured_decoding_over_bfloat16_writes_what_plain_decoding_writes(size: float, targets: Any) -> None:
    """The joined products and the trainer's layers round at the same places; only the order of sums differs."""
    half = half_policy(lora={"r": 3, "targets": targets})
    with torch.no_grad():
        for name, parameter in half.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=size or 1e-9, generator=torch.Generator().manual_seed(7))
    engine = Inprocess(half)
    asyncio.run(engine.load_weights(half.named_weights(), 0))
    captured = CapturedDecoder(engine._model, 8, torch.bfloat16, lambda: 0)
    gaps = []
    for request, answer in zip(asked := requests(4), decode_now(captured, asked), strict=True):
        ids = [*request.token_ids, *answer.token_ids]
        expected = sequence_logprobs(half.model, ids, compute_dtype=torch.bfloat16)[len(request.token_ids) - 1 :]
        gaps += [abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True)]
    assert max(gaps) < 0.1 * (1 + 5 * size)
    assert fmean(gaps) < 0.01 * (1 + 5 * size)
    assert captured.faults() == []


def test_an_adapter_is_added_to_a_copy_of_the_base_and_the_base_stays() -> None:
    adapted = load_policy(Model.model_validate({"device": "cpu"}), seed=0)
    engine = Inprocess(adapted)
    before = {name: tensor.clone() for name, tensor in adapted.model.named_parameters()}
    asyncio.run(engine.load_weights(adapted.named_weights(), 0))
    probe = list(requests(1)[0].token_ids)
    base = sequence_logprobs(policy().model, probe)
    assert asyncio.run(engine.score(probe)) == pytest.approx(base, abs=1e-5)  # B = 0 at first
    with torch.no_grad():
        for name, parameter in adapted.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(7))
    asyncio.run(engine.load_weights(adapted.named_weights(), 1))
    adapted_scores = sequence_logprobs(adapted.model.eval(), probe)
    assert asyncio.run(engine.score(probe)) == pytest.approx(adapted_scores, abs=1e-4)
    assert max(abs(a - b) for a, b in zip(adapted_scores, base, strict=True)) > 1e-2
    for name, tensor in adapted.model.named_parameters():
        if "lora_B" not in name:
            assert torch.equal(tensor, before[name]), name


def test_full_weights_are_the_trainers_own_memory_and_a_snapshot_is_not() -> None:
    fresh = load_policy(Model.model_validate({"device": "cpu", "lora": False}), seed=0)
    Inprocess(fresh)
    theirs = {id(p) for p in fresh.model.parameters()}
    assert {id(p) for p in fresh.twin.parameters()} == theirs
    Inprocess(fresh, snapshot=True)
    assert not {id(p) for p in fresh.twin.parameters()} & theirs


def test_a_snapshot_stays_until_the_next_load() -> None:
    fresh = load_policy(Model.model_validate({"device": "cpu", "lora": False}), seed=0)
    engine = Inprocess(fresh, snapshot=True)
    probe = list(requests(1)[0].token_ids)
    asyncio.run(engine.load_weights(fresh.named_weights(), 0))
    before = asyncio.run(engine.score(probe))
    with torch.no_grad():
        for parameter in fresh.model.parameters():
            parameter.mul_(1.1)
    assert asyncio.run(engine.score(probe)) == before
    asyncio.run(engine.load_weights(fresh.named_weights(), 1))
    assert asyncio.run(engine.score(probe)) == pytest.approx(sequence_logprobs(fresh.model, probe), abs=1e-5)
    assert engine.policy_version == 1


def test_the_version_changes_with_the_weights_however_busy_the_event_loop_is() -> None:
    engine = Inprocess(policy())

    async def load_and_look() -> int | None:
        await engine.load_weights(policy().named_weights(), 0)
        loading = asyncio.ensure_future(engine.load_weights(policy().named_weights(), 1))
        await asyncio.sleep(0)  # it is asked of the thread
        seen = SHARED._pool.submit(lambda: engine.policy_version).result(10)  # the event loop stands still meanwhile
        await loading
        return seen

    assert asyncio.run(load_and_look()) == 1


def test_another_call_gets_its_turn_while_a_long_batch_is_written() -> None:
    """As a pool asks whether its member is alive."""
    engine = Inprocess(policy())
    order: list[str] = []

    async def call(name: str, asked: list[Request]) -> None:
        await asyncio.gather(*map(engine.generate, asked))
        order.append(name)

    async def both() -> None:
        long = asyncio.create_task(call("long", requests(6, 8, Sampling(max_new_tokens=200))))
        await asyncio.sleep(0.05)
        await call("short", requests(1, 1, Sampling(max_new_tokens=1)))
        await engine.score((5, 6, 7))
        assert order == ["short"]
        await long

    asyncio.run(both())
    assert order == ["short", "long"]


def test_new_room_in_the_cache_holds_nothing_that_could_come_through_a_mask() -> None:
    keys = torch.ones(2, 1, 3, 4)
    torch.use_deterministic_algorithms(True)  # fresh memory is filled with NaN
    try:
        assert torch.empty(1).isnan().all()
        wide = widen(keys, 8)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(wide[:, :, :3], keys)
    assert torch.equal(wide[:, :, 3:], torch.zeros(2, 1, 5, 4))
