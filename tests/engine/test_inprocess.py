"""The in-process engine on the real embedded model."""

import asyncio
from functools import lru_cache

import pytest
import torch

from podium.engine._slots import widen
from podium.engine.inprocess import Inprocess
from podium.errors import InputError
from podium.model.device_thread import SHARED
from podium.model.forward import sequence_logprobs
from podium.model.load import Policy, load_policy, twin_of
from podium.records import Answer, Request, Sampling
from podium.settings import Model
from tests.model.test_attention import SHAPES, a_model

EOS = 2


@lru_cache
def policy() -> Policy:
    return load_policy(Model.model_validate({"device": "cpu", "lora": False}), seed=0)


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(policy().tokenizer.encode(f"<s>{text}\n"))


def requests(count: int = 5, rollouts: int = 4) -> list[Request]:
    """Prompts of different lengths."""
    texts = ["What is 37 + 48?", "What is 10 - 99?", "37 + 48", "What is 12 + 13? Please.", "2"]
    return [Request(k, ids_of(texts[k % 5]), tuple(range(k * 100, k * 100 + rollouts))) for k in range(count)]


def generate(engine: Inprocess, asked: list[Request], sampling: Sampling) -> list[Answer]:
    async def run() -> list[Answer]:
        return [answer async for answer in engine.generate(asked, sampling)]

    return asyncio.run(run())


SAMPLING = Sampling(max_new_tokens=24, stop_ids=(EOS,))


def test_sampled_logprobs_equal_the_trainers() -> None:
    answers = generate(Inprocess(policy()), requests(), SAMPLING)
    for request, answer in zip(requests(), answers, strict=True):
        for ids, logprobs in zip(answer.token_ids, answer.logprobs, strict=True):
            expected = sequence_logprobs(policy().model, [*request.token_ids, *ids])[len(request.token_ids) - 1 :]
            assert logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_sampled_logprobs_equal_the_trainers_for_other_architectures(shape: str) -> None:
    """Grouped queries, normed queries, sliding windows shorter than the answer."""
    model = a_model(shape)
    other = Policy(model, twin_of(model), None, None, (), 64, torch.device("cpu"), "")
    asked = [Request(k, tuple(range(3, 5 + 3 * k)), (k, k + 100)) for k in range(3)]
    answers = generate(Inprocess(other), asked, Sampling(max_new_tokens=20))
    for request, answer in zip(asked, answers, strict=True):
        for ids, logprobs in zip(answer.token_ids, answer.logprobs, strict=True):
            expected = sequence_logprobs(model, [*request.token_ids, *ids])[len(request.token_ids) - 1 :]
            assert logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_logprobs_are_tempered(temperature: float) -> None:
    sampling = Sampling(max_new_tokens=6, temperature=temperature, stop_ids=(EOS,))
    [answer] = generate(Inprocess(policy()), requests(1, 1), sampling)
    prompt = requests(1)[0].token_ids
    with torch.no_grad():
        all_ = policy().twin(torch.tensor([[*prompt, *answer.token_ids[0]]])).logits[0] / temperature
    expected = [float(all_[len(prompt) - 1 + t].log_softmax(-1)[token]) for t, token in enumerate(answer.token_ids[0])]
    assert answer.logprobs[0] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("concurrency", [1, 3, 4, 9, 512])
def test_rollouts_do_not_depend_on_how_many_are_written_at_once(concurrency: int) -> None:
    """Slots leave, join and are moved; each rollout stays what its seed makes it."""
    expected = generate(Inprocess(policy()), requests(9), SAMPLING)
    found = generate(Inprocess(policy(), concurrency=concurrency), requests(9), SAMPLING)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    for a, b in zip(found, expected, strict=True):
        assert sum(a.logprobs, ()) == pytest.approx(sum(b.logprobs, ()), abs=1e-4)


def test_answers_come_in_the_order_of_the_requests() -> None:
    assert [answer.key for answer in generate(Inprocess(policy()), requests(9), SAMPLING)] == list(range(9))


def test_greedy_equals_transformers_generate() -> None:
    greedy = Sampling(max_new_tokens=24, temperature=0, stop_ids=(EOS,))
    answers = generate(Inprocess(policy()), requests(5, 1), greedy)
    for request, answer in zip(requests(5), answers, strict=True):
        prompt = torch.tensor([request.token_ids])
        out = policy().twin.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
        assert list(answer.token_ids[0]) == out[0, prompt.shape[1] :].tolist()


def test_the_stop_token_is_kept_and_nothing_after_it() -> None:
    answers = generate(Inprocess(policy()), requests(9, 8), Sampling(max_new_tokens=40, stop_ids=(EOS,)))
    rollouts = [(ids, reason) for a in answers for ids, reason in zip(a.token_ids, a.finish_reasons, strict=True)]
    stopped = [ids for ids, reason in rollouts if reason == "stop"]
    assert stopped
    assert all(ids[-1] == EOS and EOS not in ids[:-1] for ids in stopped)
    assert len({len(ids) for ids in stopped}) > 1  # they ended at different moments of one batch


def test_an_answer_that_is_too_long_is_cut_and_says_so() -> None:
    [answer] = generate(Inprocess(policy()), requests(1), Sampling(max_new_tokens=3, stop_ids=(EOS,)))
    assert [len(ids) for ids in answer.token_ids] == [3] * 4
    assert answer.finish_reasons == ("length",) * 4


def test_a_stop_token_in_the_last_place_is_a_stop() -> None:
    newline = policy().tokenizer.encode("\n")[0]
    [answer] = generate(Inprocess(policy()), requests(1, 1), Sampling(max_new_tokens=200, stop_ids=(newline,)))
    length = len(answer.token_ids[0])
    [again] = generate(Inprocess(policy()), requests(1, 1), Sampling(max_new_tokens=length, stop_ids=(newline,)))
    assert again.finish_reasons == ("stop",)
    assert again.token_ids == answer.token_ids


def test_no_stop_ids_means_length_only() -> None:
    [answer] = generate(Inprocess(policy()), requests(1), Sampling(max_new_tokens=30))
    assert [len(ids) for ids in answer.token_ids] == [30] * 4


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
        generate(engine, requests(3, 8), SAMPLING)
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
        generate(engine, requests(9, 8), Sampling(max_new_tokens=60, stop_ids=(EOS,)))
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
        generate(engine, requests(9, 4), Sampling(max_new_tokens=24, stop_ids=(EOS,)))
    finally:
        hook.remove()
    assert max(largest) < max(len(request.token_ids) for request in requests(9)) + 24


def test_prompts_of_one_token_and_answers_of_one_token() -> None:
    asked = [Request(k, (40 + k,), (k, k + 9)) for k in range(3)]
    for answer in generate(Inprocess(policy()), asked, Sampling(max_new_tokens=1, stop_ids=(EOS,))):
        assert [len(ids) for ids in answer.token_ids] == [1, 1]


def test_a_model_that_it_cannot_decode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Inprocess._logits
    monkeypatch.setattr(Inprocess, "_logits", lambda self, hidden: real(self, hidden) * 1.1)
    with pytest.raises(InputError, match="cannot decode this architecture"):
        Inprocess(policy())


def test_bfloat16_samples_through_the_adapters_own_layers() -> None:
    half = load_policy(Model.model_validate({"device": "cpu", "dtype": "bfloat16"}), seed=0)
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
    assert asyncio.run(engine.score(probe)) == sequence_logprobs(half.model, probe)
    with pytest.raises(InputError, match="sync_every must be 1"):
        Inprocess(half, snapshot=True)


def test_an_adapter_is_laid_over_the_base_and_the_base_stays() -> None:
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

    async def call(name: str, asked: list[Request], sampling: Sampling) -> None:
        async for _ in engine.generate(asked, sampling):
            order.append(name)

    async def both() -> None:
        long = asyncio.create_task(call("long", requests(6, 8), Sampling(max_new_tokens=200)))
        await asyncio.sleep(0.05)
        await call("short", requests(1, 1), Sampling(max_new_tokens=1))
        assert order == ["short"]
        await long

    asyncio.run(both())
    assert order == ["short", *["long"] * 6]


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
