"""The in-process engine on CUDA: captured decoding writes what plain decoding writes, for every size of a batch.

Tolerances of logprobs: 1e-4 in float32; in bfloat16, against the trainer's own bfloat16 forward pass, 0.05 at most and
0.015 on average. With a random adapter, whose model is unsure of itself, rounding alone moves single tokens by up to
0.12 (seen on a CPU); there 0.15 at most.
"""

import asyncio
import copy
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from podium.engine import inprocess
from podium.engine._cuda.roster import ladder
from podium.engine.inprocess import Inprocess
from podium.model import attention
from podium.model.forward import sequence_logprobs
from podium.model.load import Policy, load_policy, twin_of
from podium.model.products import ExactSums, keep_exact_sums
from podium.records import Answer, Request, Sampling
from podium.settings import Model
from tests.model.test_attention import SHAPES, a_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler warns of its own parts
]

GREEDY = Sampling(max_new_tokens=12, temperature=0)
TOLERANCE = {None: 1e-4, torch.bfloat16: 0.05}
ADAPTED_TOLERANCE = {None: 1e-4, torch.bfloat16: 0.15}
MEAN_TOLERANCE = {None: 1e-4, torch.bfloat16: 0.015}
Made = dict[int, Answer]


def policy_of(model: Any, exact: ExactSums = "residual") -> Policy:
    model = model.cuda()
    keep_exact_sums(model, exact)
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


def requests(rollouts: int, group: int = 8, vocabulary: int = 50) -> list[Request]:
    """Prompts of different lengths."""
    return [
        Request(
            k,
            tuple((7 * k + 3 * i) % (vocabulary - 3) + 3 for i in range(2 + k % 9)),
            tuple(range(k * 100, k * 100 + group)),
        )
        for k in range(rollouts // group)
    ]


def generate(engine: Inprocess, asked: list[Request], sampling: Sampling) -> Made:
    async def run() -> Made:
        return {answer.key: answer async for answer in engine.generate(asked, sampling)}

    return asyncio.run(run())


def plain(engine: Inprocess) -> Inprocess:
    """The same weights without captured steps."""
    other = copy.copy(engine)
    other._continuous = None
    return other


def assert_trained_alike(policy: Policy, asked: list[Request], made: Made, dtype: torch.dtype | None) -> None:
    """The logprobs are those of the trainer's forward pass."""
    found = gaps(policy, asked, made, dtype)
    assert max(found) <= (TOLERANCE if policy.peft is None else ADAPTED_TOLERANCE)[dtype]
    assert fmean(found) <= MEAN_TOLERANCE[dtype]


def gaps(policy: Policy, asked: list[Request], made: Made, dtype: torch.dtype | None) -> list[float]:
    """How far each token's logprob is from the trainer's, in two answers to each prompt."""
    found: list[float] = []
    for request in asked:
        for ids, logprobs in list(zip(made[request.key].token_ids, made[request.key].logprobs, strict=True))[:2]:
            expected = sequence_logprobs(policy.model, [*request.token_ids, *ids], compute_dtype=dtype)
            own = expected[len(request.token_ids) - 1 :]
            found += [abs(mine - theirs) for mine, theirs in zip(logprobs, own, strict=True)]
    return found


def test_greedy_answers_equal_the_plain_ones_for_every_size_of_the_ladder() -> None:
    engine = Inprocess(policy_of(wide_model()))
    for size in ladder(192):
        asked = requests(size, vocabulary=1024)
        found, expected = generate(engine, asked, GREEDY), generate(plain(engine), asked, GREEDY)
        assert engine._continuous is not None
        for key, answer in expected.items():
            assert found[key].token_ids == answer.token_ids, size
            for mine, theirs in zip(found[key].logprobs, answer.logprobs, strict=True):
                assert mine == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, "wide"])
def test_logprobs_are_the_trainers_with_refill_and_compaction(shape: str, dtype: torch.dtype | None) -> None:
    """40 rollouts on 13 slots, which end at different moments."""
    policy = policy_of(wide_model() if shape == "wide" else a_model(shape))
    engine = Inprocess(policy, False, dtype, concurrency=13)
    asked = requests(40)
    stops = tuple(range(0, policy.vocabulary, 20))
    for sampling in (Sampling(max_new_tokens=40, stop_ids=stops), Sampling(max_new_tokens=40)):
        made = generate(engine, asked, sampling)
        assert engine._continuous is not None
        assert sorted(made) == [request.key for request in asked]
        assert_trained_alike(policy, asked, made, dtype)
    lengths = {len(ids) for a in generate(engine, asked, Sampling(40, stop_ids=stops)).values() for ids in a.token_ids}
    assert len(lengths) > 3


@pytest.mark.parametrize(
    "sampling",
    [Sampling(max_new_tokens=16, top_p=0.7), Sampling(max_new_tokens=16, top_k=5), Sampling(16, temperature=0.6)],
    ids=["top_p", "top_k", "tempered"],
)
def test_draws_equal_those_of_the_plain_path(sampling: Sampling) -> None:
    engine = Inprocess(policy_of(wide_model()), concurrency=24)
    asked = requests(64, vocabulary=1024)
    found, expected = generate(engine, asked, sampling), generate(plain(engine), asked, sampling)
    assert engine._continuous is not None
    same = [found[key].token_ids[k] == ids for key, a in expected.items() for k, ids in enumerate(a.token_ids)]
    assert sum(same) >= len(same) - 1  # a random number may fall on the edge between two ids
    for key, answer in expected.items():
        for mine, theirs in zip(found[key].logprobs, answer.logprobs, strict=True):
            assert mine[0] == pytest.approx(theirs[0], abs=1e-4)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_an_adapter_is_applied_and_new_weights_are_used_at_once(dtype: torch.dtype | None) -> None:
    policy = load_policy(Model.model_validate({"device": "cuda"}), seed=0)
    engine = Inprocess(policy, False, dtype)
    asked = requests(24)
    base = made = generate(engine, asked, GREEDY)
    torch.manual_seed(0)
    for version in (1, 2):
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if "lora_B" in name:
                    parameter.add_(0.03 * torch.randn_like(parameter))
        assert fmean(gaps(policy, asked, made, dtype)) > 2 * MEAN_TOLERANCE[torch.bfloat16]  # a version old: seen
        asyncio.run(engine.load_weights(policy.named_weights(), version))
        made = generate(engine, asked, GREEDY)
        assert engine._continuous is not None
        assert_trained_alike(policy, asked, made, dtype)
        assert {key: a.token_ids for key, a in made.items()} != {key: a.token_ids for key, a in base.items()}
        assert all(answer.policy_versions == ((version, version),) * 8 for answer in made.values())


@pytest.mark.parametrize("exact", ["residual", "mlp"])
def test_full_weights_in_bfloat16_follow_the_trainer(exact: ExactSums) -> None:
    policy = policy_of(wide_model(), exact)
    engine = Inprocess(policy, False, torch.bfloat16)
    asked = requests(16)
    for version in (0, 1):
        asyncio.run(engine.load_weights(policy.named_weights(), version))
        assert_trained_alike(policy, asked, generate(engine, asked, GREEDY), torch.bfloat16)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.2)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_a_replayed_score_is_that_of_the_weights_that_decode(dtype: torch.dtype | None) -> None:
    policy = policy_of(wide_model())
    engine = Inprocess(policy, False, dtype)
    text = [1 + i % 50 for i in range(40)]
    generate(engine, requests(8), GREEDY)
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

    monkeypatch.setattr("podium.engine._cuda.decode_step.compile_layers", broken)
    policy = policy_of(a_model("llama"))
    engine = Inprocess(policy)
    with pytest.warns(UserWarning, match="without CUDA graphs.*no such kernel"):
        made = generate(engine, requests(16), GREEDY)
    assert_trained_alike(policy, requests(16), made, None)
    monkeypatch.setattr(inprocess, "has_triton", lambda: False)
    with pytest.warns(UserWarning, match="Triton"):
        Inprocess(policy)


def test_a_step_waits_for_nothing() -> None:
    """Between two looks at what has ended, the host waits for the device only for what it looked at before."""
    engine = Inprocess(policy_of(wide_model()))
    asked = requests(64, vocabulary=1024)
    generate(engine, asked, Sampling(max_new_tokens=64))
    torch.cuda.set_sync_debug_mode("error")
    try:
        step = engine._continuous._step  # type: ignore[union-attr]
        assert step is not None
        with torch.no_grad():
            for _ in range(8):
                step.run(64, next(iter(step._graphs))[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
