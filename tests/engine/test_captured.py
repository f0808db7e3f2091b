"""Captured decoding, run plainly on the CPU: the same answers as plain decoding, however it is cut."""

import asyncio
import copy
from collections import Counter
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from podium.engine.cuda import captured as module
from podium.engine.cuda import decode_step, roster
from podium.engine.cuda.captured import CapturedDecoder
from podium.engine.decoding.linear import PackedLinear, join_weights
from podium.engine.decoding.queue import Arrivals, Job, decode_now
from podium.engine.decoding.trial import captured_gap, small_policy
from podium.engine.inprocess import Inprocess, PlainDecoder
from podium.errors import InputError
from podium.model import attention
from podium.model.load import Policy, twin_of
from podium.model.memory import cache_elements_per_token
from podium.model.self_check import small_copy
from podium.records import Answer, Request, Sampling
from tests.engine.test_inprocess import (
    EOS,
    assert_same,
    assert_scored,
    generate,
    group,
    mixed,
    policy,
    requests,
)
from tests.families import config_of
from tests.model.test_attention import SHAPES, a_model


def decoder(concurrency: int = 512, model=None, dtype: torch.dtype | None = None, version: int = 3) -> CapturedDecoder:
    return CapturedDecoder(model or policy().twin, concurrency, dtype, lambda: version)


@lru_cache
def plain() -> Inprocess:
    return Inprocess(policy())


def assert_as_plain(made: CapturedDecoder, asked: list[Request]) -> None:
    assert_same(decode_now(made, asked), generate(plain(), asked))


@pytest.mark.parametrize("concurrency", [1, 3, 8, 20, 512])
@pytest.mark.parametrize("steps_ahead", [1, 4, 50])
def test_it_writes_what_plain_decoding_writes(
    concurrency: int, steps_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots and prompts' places are taken again by others, batches shrink, ends are seen late."""
    monkeypatch.setattr(module, "STEPS_AHEAD", steps_ahead)
    assert_as_plain(decoder(concurrency), requests(9))


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
    assert_as_plain(decoder(8), requests(5, 4, sampling))


def test_one_step_serves_rollouts_of_different_samplings() -> None:
    assert_as_plain(decoder(512), mixed())
    assert_as_plain(decoder(10), mixed())


@pytest.mark.parametrize("shape", SHAPES)
def test_other_architectures(shape: str) -> None:
    """Grouped queries, normed queries, sliding windows shorter than prompt and answer."""
    model, twenty = a_model(shape), Sampling(max_new_tokens=20)
    asked = [each for k in range(3) for each in group(k, tuple(range(3, 5 + 3 * k)), (k, k + 100), twenty)]
    assert_scored(model, asked, decode_now(decoder(4, twin_of(model)), asked))


def test_one_decoder_serves_requests_of_different_sizes_one_after_the_other() -> None:
    made = decoder(16)
    for count, longest in ((2, 4), (9, 30), (1, 8)):
        assert_as_plain(made, requests(count, 4, Sampling(max_new_tokens=longest, stop_ids=(EOS,))))


def test_a_prompt_goes_through_the_model_once_even_if_its_group_does_not_fit() -> None:
    rows = []
    model = twin_of(policy().model)
    hook = model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    decode_now(decoder(8, model), requests(3, 20))
    hook.remove()
    assert sum(columns for columns in rows if columns > 1) == sum(len(each.token_ids) for each in requests(3, 1))


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of four tokens, so that short answers take several."""
    for each in (roster, decode_step, module):
        monkeypatch.setattr(each, "PAGE", 4)


def short_of_pages(num_pages: int, asked: list[Request], model=None) -> CapturedDecoder:
    """A decoder with eight slots and so many pages for these requests, the spare page aside."""
    model = model or policy().twin
    ample = decoder(8, model)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    capacity = replace(ample.reserve(asked).capacity, pages=num_pages + 1)
    budget = capacity.cache_bytes(ample._bytes_per_token, vocabulary)
    made = CapturedDecoder(model, 8, None, lambda: 3, budget)
    assert made.reserve(asked).capacity == capacity
    return made


def assert_no_page_lost(made: CapturedDecoder) -> None:
    """All pages are free but those of prompts whose groups may still go on."""
    kept = [page for place in made._roster._places.values() for page in place.pages]
    assert made._step is not None
    assert len(made._roster._free_pages) + len(kept) == made._step.capacity.pages - 1
    assert made._roster.is_empty


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("num_pages", [14, 24])
@pytest.mark.parametrize("steps_ahead", [1, 4, 9])
def test_rollouts_that_are_paused_go_on_as_if_they_had_not_been(
    num_pages: int, steps_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing drawn is drawn again, and the next tokens have the logprobs that they would have had."""
    monkeypatch.setattr(module, "STEPS_AHEAD", steps_ahead)
    model, sampling = twin_of(a_model("llama")), Sampling(max_new_tokens=24, stop_ids=(5, 9))
    asked = [each for k in range(5) for each in group(k, tuple(range(3, 5 + 3 * k)), range(4 * k, 4 * k + 4), sampling)]
    made = short_of_pages(num_pages, asked, model)
    found, expected = decode_now(made, asked), decode_now(decoder(8, model), asked)
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    for mine, other in zip(found, expected, strict=True):
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert any(answer.num_pauses for answer in found)
    assert not any(answer.num_pauses for answer in expected)
    assert_no_page_lost(made)


@pytest.mark.usefixtures("small_pages")
def test_with_the_same_requests_the_same_rollouts_are_paused_and_all_repeats_bit_for_bit() -> None:
    asked = mixed()
    first, again = (decode_now(short_of_pages(20, asked), asked) for _ in range(2))
    assert first == again
    assert any(answer.num_pauses for answer in first)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("shape", SHAPES)
def test_paused_rollouts_of_other_architectures(shape: str) -> None:
    """Windows that are shorter than what a paused rollout computes again."""
    model, twenty = a_model(shape), Sampling(max_new_tokens=20)
    asked = [each for k in range(3) for each in group(k, tuple(range(3, 5 + 3 * k)), (k, k + 100), twenty)]
    made = short_of_pages(12, asked, twin_of(model))
    assert_scored(model, asked, answers := decode_now(made, asked))
    assert any(answer.num_pauses for answer in answers)


@pytest.mark.usefixtures("small_pages")
def test_cancelled_jobs_free_their_pages_paused_ones_too() -> None:
    asked = requests(5, 4, Sampling(max_new_tokens=24))
    jobs, made = [Job(request) for request in asked], short_of_pages(20, asked)
    arrivals, found, was_paused = Arrivals(jobs), {}, False
    for outcomes in made.run(arrivals):
        found |= dict(outcomes)
        if made._roster.paused and made._roster.seats and not was_paused:
            was_paused = made._roster.paused[0].job.is_cancelled = made._roster.seats[0].job.is_cancelled = True
    assert was_paused
    assert len(found) == len(jobs) - 2
    expected = decode_now(decoder(8), asked)
    assert_same([found[job] for job in jobs if job in found], [expected[k] for k, j in enumerate(jobs) if j in found])
    assert_no_page_lost(made)
    for request in asked:
        assert request.prefix_group is not None
        arrivals.release(request.prefix_group.name)
    list(made.run(arrivals))
    assert made._roster._places == {}


@pytest.mark.usefixtures("small_pages")
def test_requests_that_need_more_room_wait_until_what_is_paused_has_ended() -> None:
    first, later = requests(5, 4), requests(9, 4, Sampling(max_new_tokens=40))[20:]
    jobs, more, made = [Job(each) for each in first], [Job(each) for each in later], short_of_pages(20, first)
    arrivals, found = Arrivals(jobs), {}
    for turn, outcomes in enumerate(made.run(arrivals)):
        found |= dict(outcomes)
        if turn == 0:
            arrivals.add(more)
    assert_same([found[job] for job in (*jobs, *more)], generate(plain(), [*first, *later]))
    assert any(job.num_pauses for job in jobs)


@pytest.mark.usefixtures("small_pages")
def test_weights_may_change_while_rollouts_are_paused() -> None:
    """What was written is computed again with the new weights, which write the rest."""
    model, version, twenty = a_model("llama"), [3], Sampling(max_new_tokens=20)
    asked = [each for k in range(3) for each in group(k, (5, 6, 7 + k), (k, k + 100), twenty)]
    made = short_of_pages(14, asked, twin_of(model))
    made._version = lambda: version[0]
    answers = {}
    for outcomes in made.run(Arrivals([Job(each) for each in asked])):
        answers |= dict(outcomes)
        if made._roster.paused and version[0] == 3:
            version[0] = 4
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            made.take_weights()
    assert version[0] == 4
    for job, answer in answers.items():
        assert len(answer.token_ids) == 20
        if answer.policy_versions == (4, 4):
            assert_scored(model, [job.request], [answer])
    assert_no_page_lost(made)


def test_a_request_that_would_not_fit_alone_is_refused_with_words() -> None:
    asked = requests(1, 1, Sampling(max_new_tokens=40))
    made = CapturedDecoder(policy().twin, 8, None, lambda: 3, cache_bytes=100_000)
    with pytest.raises(
        InputError, match=r"request train/0 has \d+ tokens and may get 40 more; the memory.*max_new_tok"
    ):
        made.check_room(asked[0])
    with pytest.raises(InputError, match="train/0"):
        decode_now(made, asked)


def test_memory_that_is_given_is_never_exceeded_and_bounds_the_rollouts_at_once() -> None:
    """Where there are fewer pages than slots would need at once, there are fewer slots."""
    made = CapturedDecoder(policy().twin, 512, None, lambda: 3, cache_bytes=(budget := 12_000_000))
    assert made.reserve(requests(9, 8)).capacity.slots < decoder().reserve(requests(9, 8)).capacity.slots
    for longest in (24, 600, 24):
        capacity = made.reserve(requests(9, 8, Sampling(max_new_tokens=longest))).capacity
        assert capacity.cache_bytes(made._bytes_per_token, policy().vocabulary) <= budget
        assert capacity.columns >= longest
    assert_as_plain(made, requests(9, 8))


def test_no_more_pages_are_taken_than_the_requests_could_need() -> None:
    """9 groups of 8 in 128 slots: a page for each rollout and each prompt, and those that stay free for growth."""
    made = decoder()
    assert made.reserve(requests(9, 8)).capacity.pages == 1 + 128 + 16 + 16


def test_keys_and_values_are_counted_as_the_layers_fill_them() -> None:
    assert decoder()._bytes_per_token == 4 * cache_elements_per_token(policy().twin)


def test_given_up_in_the_middle_it_serves_the_next_requests() -> None:
    made = decoder(8)
    running = made.run(Arrivals([Job(request) for request in requests(9)]))
    assert next(outcomes for outcomes in running if outcomes)
    running.close()
    assert_as_plain(made, requests(4))


def test_requests_that_arrive_while_others_are_written_join_them() -> None:
    """Also such as need more room than there is: they wait until the others have ended."""
    later = requests(9, 4, Sampling(max_new_tokens=70))[4:]
    first = [Job(request) for request in requests(1)]
    second = [Job(request) for request in later]
    arrivals, found = Arrivals(first), {}
    for turn, outcomes in enumerate(decoder(64).run(arrivals)):
        found |= dict(outcomes)
        if turn == 0:
            arrivals.add(second)
    assert_same([found[job] for job in [*first, *second]], generate(plain(), [*requests(1), *later]))


def test_cancelled_jobs_free_their_slots_for_others() -> None:
    jobs = [Job(request) for request in requests(9)]
    found = {}
    for turn, outcomes in enumerate(decoder(8).run(Arrivals(jobs))):
        found |= dict(outcomes)
        if turn == 0:
            for job in jobs[::5]:
                job.is_cancelled = True
    left = [k for k in range(len(jobs)) if jobs[k] in found]
    assert set(left) >= {k for k in range(len(jobs)) if k % 5}
    expected = generate(plain(), requests(9))
    assert_same([found[jobs[k]] for k in left], [expected[k] for k in left])


def test_new_weights_are_used_at_once() -> None:
    model = a_model("llama")
    fresh = Policy(model, twin_of(model), None, None, (), 64, torch.device("cpu"), "")
    made, asked = decoder(8, fresh.twin), group(0, (5, 6, 7), (1, 2))
    decode_now(made, asked)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert_scored(model, asked, decode_now(made, asked))


@pytest.mark.parametrize("shape", SHAPES)
def test_joined_products_are_those_of_the_layers_one_by_one(shape: str) -> None:
    """And weights that are loaded layer by layer afterwards are in them."""
    model = a_model(shape)
    sampled = copy.deepcopy(model)
    join_weights(sampled)
    made, asked = decoder(8, sampled), group(0, (5, 6, 7), (1, 2))
    for factor in (1.0, 1.3):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                dict(sampled.named_parameters())[name].copy_(parameter.mul_(factor))
        assert_scored(model, asked, decode_now(made, asked))


def test_weights_and_version_may_change_in_the_middle() -> None:
    """A prompt computed before is not used for rollouts that begin with the new weights."""
    model, version, twelve = a_model("llama"), [3], Sampling(max_new_tokens=12)
    made = CapturedDecoder(twin_of(model), 8, None, lambda: version[0])
    jobs = [Job(each) for k in range(4) for each in group(k, (5, 6, 7 + k), range(4), twelve)]
    late = [Job(each) for each in group(4, (5, 6, 7), range(4), twelve)]
    jobs.insert(0, late.pop(0))  # the first of its group begins with the old weights
    arrivals, found = Arrivals(jobs), {}
    for outcomes in made.run(arrivals):
        found |= dict(outcomes)
        if version[0] == 3:
            version[0] = 4
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            made.take_weights()
            arrivals.add(late)
    assert Counter(answer.policy_versions for answer in found.values())[3, 3] == 8
    new = [job for job, answer in found.items() if answer.policy_versions == (4, 4)]
    assert set(late) <= set(new)
    assert_scored(model, [job.request for job in new], [found[job] for job in new])


def test_evaluation_and_training_share_the_captured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request falls back to plain decoding, and none disturbs another."""
    greedy = Sampling(max_new_tokens=6, temperature=0)
    engine = Inprocess(policy())
    engine._captured, engine._is_compared = decoder(512, engine._model, version=0), True
    expected = generate(plain(), requests(9)), generate(plain(), requests(3, 4, greedy))
    monkeypatch.setattr(engine._plain, "run", lambda arrivals: pytest.fail("plain decoding"))

    async def both() -> list[list[Answer]]:
        training = asyncio.gather(*map(engine.generate, requests(9)))
        await asyncio.sleep(0.01)
        evaluation = asyncio.gather(*map(engine.generate, requests(3, 4, greedy)))
        return [await training, await evaluation]

    sampled, short = asyncio.run(both())
    assert_same(sampled, expected[0])
    assert_same(short, expected[1])


@pytest.mark.parametrize("kind", [CapturedDecoder, PlainDecoder])
def test_two_halves_of_a_step_as_two_streams_need_no_more_decode_steps_than_one(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed. The second stream begins when the first is being served, at most 8 of 240 steps later. There
    is room for both, as there is from a run's second step on."""
    monkeypatch.setattr(module, "LOOKS_PER_TURN", 1)
    owner, name = (decode_step.DecodeStep, "run") if kind is CapturedDecoder else (PlainDecoder, "_advance")
    run, num_steps = getattr(owner, name), 0

    def counted(*arguments: object) -> object:
        nonlocal num_steps
        num_steps += 1
        return run(*arguments)

    monkeypatch.setattr(owner, name, counted)
    asked = requests(4, 4, Sampling(max_new_tokens=240))
    made = decoder() if kind is CapturedDecoder else plain()._plain

    def steps_of(*streams: list[Request]) -> int:
        nonlocal num_steps
        num_steps = 0
        first, *later = [[Job(request) for request in stream] for stream in streams]
        arrivals, found = Arrivals(first), {}
        for outcomes in made.run(arrivals):
            found |= dict(outcomes)
            while later:
                arrivals.add(later.pop())
        assert len(found) == len(asked)
        return num_steps

    assert steps_of(asked) == 239  # the first token is drawn from the prompt
    assert steps_of(asked[:8], asked[8:]) <= 1.05 * 239


def test_the_cache_of_a_model_in_the_trainers_precision_can_be_counted() -> None:
    """Its layers are in bfloat16 and its states in float32, so it runs under autocast only."""
    model = copy.deepcopy(policy().twin)  # other tests share the policy
    for layer in model.modules():
        if type(layer) is torch.nn.Linear and layer is not model.get_output_embeddings():
            layer.to(torch.bfloat16)
    assert cache_elements_per_token(model, torch.bfloat16) == cache_elements_per_token(policy().twin)
    made = decoder(8, model, torch.bfloat16)
    assert len(decode_now(made, requests(2))) == 8
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
    assert captured_gap(tried) < 1e-3
