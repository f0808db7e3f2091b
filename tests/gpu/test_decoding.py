"""The in-process engine on CUDA: captured decoding writes what plain decoding writes, for every size of a batch.

Tolerances of logprobs: 1e-4 in float32; in bfloat16, against the trainer's own bfloat16 forward pass, 0.05 at most and
0.015 on average. With a random adapter, whose model is unsure of itself, rounding alone moves single tokens by up to
0.12 (seen on a CPU); there 0.15 at most.
"""

import asyncio
import copy
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from podium.engine import inprocess
from podium.engine.cuda.roster import ladder
from podium.engine.decoding.queue import RequestQueue
from podium.engine.inprocess import Inprocess
from podium.model import attention
from podium.model.forward import keep_exact_sums, sequence_logprobs
from podium.model.load import Policy, load_policy, twin_of
from podium.records import Answer, PrefixGroup, Request, Sampling
from podium.settings.tables import Model
from tests.model.test_attention import SHAPES, a_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler warns of its own parts
]

GREEDY = Sampling(max_new_tokens=12, temperature=0)
TOLERANCE = {None: 1e-4, torch.bfloat16: 0.05}
ADAPTED_TOLERANCE = {None: 1e-4, torch.bfloat16: 0.15}
MEAN_TOLERANCE = {None: 1e-4, torch.bfloat16: 0.015}


def policy_of(model: Any) -> Policy:
    model = model.cuda()
    keep_exact_sums(model)
    return Policy(model, twin_of(model), None, None, (), 512, torch.device("cuda"), "")


def wide_model() -> Any:
    """Heads as large as real ones."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=192,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).eval()


def requests(rollouts: int, sampling: Sampling = GREEDY, group: int = 8, vocabulary: int = 50) -> list[Request]:
    """Rollouts of prompts of different lengths."""
    prompts = [
        tuple((7 * k + 3 * i) % (vocabulary - 3) + 3 for i in range(2 + k % 9)) for k in range(rollouts // group)
    ]
    return [
        Request(ids, sampling, k * 100 + sample, PrefixGroup(f"train/{k}", group))
        for k, ids in enumerate(prompts)
        for sample in range(group)
    ]


def generate(engine: Inprocess, asked: list[Request]) -> list[Answer]:
    async def run() -> list[Answer]:
        return list(await asyncio.gather(*map(engine.generate, asked)))

    return asyncio.run(run())


def plain(engine: Inprocess) -> Inprocess:
    """The same weights without captured steps."""
    other = copy.copy(engine)
    other._captured = None
    other._queue = RequestQueue(other._thread, other._decode)
    return other


def assert_trained_alike(policy: Policy, asked: list[Request], made: list[Answer], dtype: torch.dtype | None) -> None:
    """The logprobs are those of the trainer's forward pass."""
    found = gaps(policy, asked, made, dtype)
    assert max(found) <= (TOLERANCE if policy.peft is None else ADAPTED_TOLERANCE)[dtype]
    assert fmean(found) <= MEAN_TOLERANCE[dtype]


def gaps(policy: Policy, asked: list[Request], made: list[Answer], dtype: torch.dtype | None) -> list[float]:
    """How far each token's logprob is from the trainer's, in every fourth answer."""
    found: list[float] = []
    for request, answer in list(zip(asked, made, strict=True))[::4]:
        expected = sequence_logprobs(policy.model, [*request.token_ids, *answer.token_ids], compute_dtype=dtype)
        own = expected[len(request.token_ids) - 1 :]
        found += [abs(mine - theirs) for mine, theirs in zip(answer.logprobs, own, strict=True)]
    return found


def test_greedy_answers_equal_the_plain_ones_for_every_size_of_the_ladder() -> None:
    engine = Inprocess(policy_of(wide_model()))
    for size in ladder(192):
        asked = requests(size, vocabulary=1024)
        found, expected = generate(engine, asked), generate(plain(engine), asked)
        assert engine._captured is not None
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.token_ids == theirs.token_ids, size
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


MIXED = [
    Sampling(max_new_tokens=16),
    Sampling(max_new_tokens=40, temperature=0),
    Sampling(max_new_tokens=24, temperature=0.6, stop_ids=(5, 9)),
    Sampling(max_new_tokens=16, top_p=0.7),
    Sampling(max_new_tokens=7, top_k=5),
]


def test_one_captured_step_serves_rollouts_of_different_samplings() -> None:
    engine = Inprocess(policy_of(wide_model()), concurrency=24)
    plainly = plain(engine)
    asked = [replace(each, sampling=MIXED[k % 5]) for k, each in enumerate(requests(64, vocabulary=1024))]
    found, expected = generate(engine, asked), generate(plainly, asked)
    assert engine._captured is not None
    same = [mine.token_ids == theirs.token_ids for mine, theirs in zip(found, expected, strict=True)]
    assert sum(same) >= len(same) - 2  # a random number may fall on the edge between two ids


def test_two_callers_at_once_are_served_by_captured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Inprocess(policy_of(wide_model()))
    training, evaluation = requests(64, Sampling(max_new_tokens=60), vocabulary=1024), requests(24, vocabulary=1024)
    expected = [generate(engine, training), generate(engine, evaluation)]
    monkeypatch.setattr(engine._plain, "run", lambda arrivals: pytest.fail("plain decoding"))

    async def both() -> list[list[Answer]]:
        first = asyncio.gather(*map(engine.generate, training))
        await asyncio.sleep(0.01)
        second = asyncio.gather(*map(engine.generate, evaluation))
        return [list(await first), list(await second)]

    for found, alone in zip(asyncio.run(both()), expected, strict=True):
        same = [mine.token_ids == theirs.token_ids for mine, theirs in zip(found, alone, strict=True)]
        assert sum(same) >= len(same) - 1


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, "wide"])
def test_logprobs_are_the_trainers_with_refill_and_compaction(shape: str, dtype: torch.dtype | None) -> None:
    """40 rollouts on 13 slots, which end at different moments."""
    policy = policy_of(wide_model() if shape == "wide" else a_model(shape))
    engine = Inprocess(policy, False, dtype, concurrency=13)
    stops = tuple(range(0, policy.vocabulary, 20))
    for sampling in (Sampling(max_new_tokens=40), Sampling(max_new_tokens=40, stop_ids=stops)):
        asked = requests(40, sampling)
        made = generate(engine, asked)
        assert engine._captured is not None
        assert_trained_alike(policy, asked, made, dtype)
    assert len({len(answer.token_ids) for answer in made}) > 3


@pytest.mark.parametrize(
    "sampling",
    [Sampling(max_new_tokens=16, top_p=0.7), Sampling(max_new_tokens=16, top_k=5), Sampling(16, temperature=0.6)],
    ids=["top_p", "top_k", "tempered"],
)
def test_draws_equal_those_of_the_plain_path(sampling: Sampling) -> None:
    engine = Inprocess(policy_of(wide_model()), concurrency=24)
    asked = requests(64, sampling, vocabulary=1024)
    found, expected = generate(engine, asked), generate(plain(engine), asked)
    assert engine._captured is not None
    same = [mine.token_ids == theirs.token_ids for mine, theirs in zip(found, expected, strict=True)]
    assert sum(same) >= len(same) - 1  # a random number may fall on the edge between two ids
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.logprobs[0] == pytest.approx(theirs.logprobs[0], abs=1e-4)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_rollouts_that_are_paused_for_lack_of_pages_go_on(dtype: torch.dtype | None) -> None:
    """A pool of 40 pages for 32 rollouts of up to four: some wait, are computed again, and repeat bit for bit."""
    policy = policy_of(wide_model())
    asked = requests(32, Sampling(max_new_tokens=200), vocabulary=1024)
    ample = Inprocess(policy_of(wide_model()), False, dtype)  # an engine changes the layers of its policy's twin
    expected = generate(ample, asked)
    assert ample._captured is not None
    assert ample._captured._step is not None
    capacity = replace(ample._captured._step.capacity, pages=40)
    runs = []
    for _ in range(2):
        budget = capacity.cache_bytes(ample._captured._bytes_per_token, policy.vocabulary)
        engine = Inprocess(policy_of(wide_model()), False, dtype, cache_bytes=budget)
        runs.append(generate(engine, asked))
        assert engine._captured is not None
        assert any(answer.num_pauses for answer in runs[-1])
        assert engine._captured._step is not None
        assert engine._captured._step.capacity.pages <= 40
    assert runs[0] == runs[1]
    assert_trained_alike(policy, asked, runs[0], dtype)
    if dtype is None:
        same = [mine.token_ids == theirs.token_ids for mine, theirs in zip(runs[0], expected, strict=True)]
        assert sum(same) >= len(same) - 2  # a random number may fall on the edge between two ids


@pytest.mark.parametrize(
    ("weights", "dtype"), [("float32", None), ("float32", torch.bfloat16), ("auto", torch.bfloat16)], ids=str
)
def test_an_adapter_is_applied_and_new_weights_are_used_at_once(weights: str, dtype: torch.dtype | None) -> None:
    policy = load_policy(Model.model_validate({"device": "cuda", "dtype": weights}), seed=0)
    assert (policy.model.dtype == torch.bfloat16) == (weights == "auto")
    engine = Inprocess(policy, False, dtype)
    asked = requests(24)
    base = made = generate(engine, asked)
    torch.manual_seed(0)
    for version in (1, 2):
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if "lora_B" in name:
                    parameter.add_(0.03 * torch.randn_like(parameter))
        assert fmean(gaps(policy, asked, made, dtype)) > 2 * MEAN_TOLERANCE[torch.bfloat16]  # a version old: seen
        asyncio.run(engine.load_weights(policy.named_weights(), version))
        made = generate(engine, asked)
        assert engine._captured is not None
        assert_trained_alike(policy, asked, made, dtype)
        assert [answer.token_ids for answer in made] != [answer.token_ids for answer in base]
        assert {answer.policy_versions for answer in made} == {(version, version)}


def test_full_weights_in_bfloat16_follow_the_trainer() -> None:
    policy = policy_of(wide_model())
    engine = Inprocess(policy, False, torch.bfloat16)
    asked = requests(16)
    for version in (0, 1):
        asyncio.run(engine.load_weights(policy.named_weights(), version))
        assert_trained_alike(policy, asked, generate(engine, asked), torch.bfloat16)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.2)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_replayed_score_is_that_of_the_weights_that_decode(dtype: torch.dtype | None) -> None:
    policy = policy_of(wide_model())
    engine = Inprocess(policy, False, dtype)
    text = [1 + i % 50 for i in range(40)]
    generate(engine, requests(8))
    found = []
    for version in range(4):  # plain, captured, replayed, replayed
        asyncio.run(engine.load_weights(policy.named_weights(), version))
        found.append(asyncio.run(engine.score(text)))
        assert found[-1] == pytest.approx(engine._score(text), abs=1e-4 if dtype is None else 0.02)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.2)
    assert engine._replayed_score._captured is not None
    assert all(abs(a - b) > 0.05 for a, b in zip(map(sum, found), map(sum, found[1:]), strict=False))
    assert asyncio.run(engine.score(text[::-1])) == pytest.approx(engine._score(text[::-1]), abs=1e-6)


def test_it_says_why_it_decodes_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("podium.engine.cuda.decode_step.compile_layers", broken)
    policy = policy_of(a_model("llama"))
    engine = Inprocess(policy)
    with pytest.warns(UserWarning, match="without CUDA graphs.*no such kernel"):
        made = generate(engine, requests(16))
    assert_trained_alike(policy, requests(16), made, None)
    monkeypatch.setattr(inprocess, "has_triton", lambda: False)
    with pytest.warns(UserWarning, match="Triton"):
        Inprocess(policy)


def test_a_step_waits_for_nothing() -> None:
    """Between two looks at what has ended, the host waits for the device only for what it looked at before."""
    engine = Inprocess(policy_of(wide_model()))
    generate(engine, requests(64, Sampling(max_new_tokens=64), vocabulary=1024))
    torch.cuda.set_sync_debug_mode("error")
    try:
        step = engine._captured._step  # type: ignore[union-attr]
        assert step is not None
        with torch.no_grad():
            for _ in range(8):
                step.run(64, next(iter(step._graphs))[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
