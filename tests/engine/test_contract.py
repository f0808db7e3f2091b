"""What every engine must do, asked of each in turn: full weights and LoRA, on the real embedded model."""

import asyncio
import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.errors import InputError, WeightsError
from podium.lookup import find
from podium.model.forward import sequence_logprobs
from podium.model.handoff import manifest_of, publish
from podium.model.load import Policy, load_policy
from podium.records import Answer, Request, Sampling
from podium.rollout.single_turn import check_answer
from podium.settings import Model
from tests.server.serving import serving

EOS = 2

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


def in_this_process(name: str, **options: Any) -> Callable[[Policy], AbstractContextManager[Any]]:
    @contextmanager
    def start(policy: Policy) -> Iterator[Any]:
        engine = find("engine", name)(policy, **options)
        yield engine
        engine.close()

    return start


def behind_a_server(inner: str, **options: Any) -> Callable[[Policy], AbstractContextManager[Any]]:
    """`options` are of the engine in the server, which is a process of its own."""

    @contextmanager
    def start(policy: Policy) -> Iterator[Any]:
        flags = [f"--engine.{key}={json.dumps(value)}" for key, value in options.items()]
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(Path(folder), "--engine", inner, "--model.device=cpu", *flags) as server,
            closing(find("engine", "vllm_server")(policy, **server.engine_options)) as engine,
        ):
            yield engine

    return start


@contextmanager
def no_next_token(engine: Any) -> Iterator[None]:
    """Writing a token fails, as it does when a GPU is lost, until the block ends."""
    owner, name = (engine._engine, "step") if hasattr(engine, "_engine") else (engine, "_advance")

    def fail(*_: Any) -> None:
        raise RuntimeError("broken on purpose")

    setattr(owner, name, fail)
    yield
    delattr(owner, name)


@dataclass(frozen=True)
class Row:
    """An engine under test."""

    start: Callable[[Policy], AbstractContextManager[Any]]
    """A policy in, a running engine out; ends it afterwards."""
    kill: Callable[[Any], AbstractContextManager[None]] | None = None
    """What becomes of it when it dies, and how it is mended; None: other processes' deaths have tests of their own."""
    needs: str | None = None
    """A package without which it cannot run."""


ENGINES = {
    "inprocess": Row(in_this_process("inprocess"), no_next_token),
    "vllm_local": Row(in_this_process("vllm_local", eager=True, concurrency=16), no_next_token, needs="vllm"),
    "vllm_server over inprocess": Row(behind_a_server("inprocess")),
    "vllm_server over vllm_local": Row(behind_a_server("vllm_local", eager=True, concurrency=16), needs="vllm"),
    "pool of inprocess": Row(in_this_process("pool")),
    "pool of vllm_local": Row(
        in_this_process(
            "pool", of="vllm_local", replicas=(1, 1), member={"eager": True, "concurrency": 16}, prompts_per_request=4
        ),
        needs="vllm",
    ),
}


@dataclass
class Bench:
    """An engine and the policy whose weights it takes."""

    name: str
    engine: Any
    policy: Policy
    folder: Path
    version: int = -1

    def load(self) -> None:
        """The policy's weights as they are now, under the next version, by the engine's first channel."""
        if "shared" not in self.engine.channels:
            self.load_folder(self.publish())
            return
        self.version += 1
        asyncio.run(self.engine.load_weights(self.policy.named_weights(), self.version))

    def publish(self) -> Path:
        root = getattr(self.engine, "weights_root", None) or self.folder
        return publish(root, self.policy, self.policy.named_weights(), self.version + 1)

    def load_folder(self, folder: Path) -> None:
        asyncio.run(self.engine.load_folder(folder, self.version + 1))
        self.version += 1

    def generate(self, asked: list[Request], sampling: Sampling) -> dict[int, Answer]:
        return asyncio.run(self.collect(asked, sampling))

    async def collect(self, asked: list[Request], sampling: Sampling) -> dict[int, Answer]:
        return {answer.key: answer async for answer in self.engine.generate(asked, sampling)}

    def score(self, ids: tuple[int, ...]) -> list[float]:
        return asyncio.run(self.engine.score(ids))

    def nudge(self, seed: int, scale: float = 0.02) -> None:
        """Changes what is trained, as an optimizer step would."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.policy.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(scope="module", params=[(name, lora) for name in ENGINES for lora in (False, True)], ids=str)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    name, lora = request.param
    row = ENGINES[name]
    if row.needs is not None and importlib.util.find_spec(row.needs) is None:
        pytest.skip(f"{row.needs} is not installed")
    policy = load_policy(Model.model_validate({"device": "cpu"} | ({} if lora else {"lora": False})), seed=0)
    with row.start(policy) as engine:
        made = Bench(name, engine, policy, tmp_path_factory.mktemp("weights"))
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


def test_a_prompt_may_fill_the_context(bench: Bench) -> None:
    ids = tuple(ids_of(bench, "What is 12 + 13?") * 40)[: bench.policy.max_context_tokens - 8]
    request = Request(0, ids, (5,))
    answer = bench.generate([request], Sampling(max_new_tokens=8))[0]
    assert len(answer.token_ids[0]) == 8
    assert answer.logprobs[0] == pytest.approx(expected_logprobs(bench, request, answer.token_ids[0]), abs=2e-3)


@pytest.mark.parametrize("excess", [1, 100])
def test_a_prompt_too_long_for_its_answer_is_refused_and_no_other_suffers(bench: Bench, excess: int) -> None:
    ids = tuple(ids_of(bench, "What is 12 + 13?") * 60)[: bench.policy.max_context_tokens - 8 + excess]
    with pytest.raises(InputError, match=f"context (has|of) {bench.policy.max_context_tokens}"):
        bench.generate([*requests(bench, 2), Request(7, ids, (5,))], Sampling(max_new_tokens=8))
    assert sorted(bench.generate(requests(bench, 2), SAMPLING)) == [0, 1]


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


def test_calls_overlap_and_each_gets_its_own_answers(bench: Bench) -> None:
    """Keys repeat between calls: they name prompts of one call."""
    one = requests(bench, 3)
    other = [Request(r.key, ids_of(bench, f"{r.key} + 1"), tuple(s + 5 for s in r.seeds)) for r in one]
    short = Sampling(max_new_tokens=5)

    async def both() -> list[dict[int, Answer]]:
        return await asyncio.gather(bench.collect(one, SAMPLING), bench.collect(other, short))

    alone = [bench.generate(one, SAMPLING), bench.generate(other, short)]
    for expected, found in zip(alone, asyncio.run(both()), strict=True):
        assert {key: answer.token_ids for key, answer in found.items()} == {
            key: answer.token_ids for key, answer in expected.items()
        }


def test_scores_come_while_rollouts_are_written(bench: Bench) -> None:
    ids, asked = ids_of(bench, "What is 12 + 13?"), requests(bench, 3)

    async def both() -> tuple[dict[int, Answer], list[float]]:
        return await asyncio.gather(bench.collect(asked, SAMPLING), bench.engine.score(ids))

    answers, scores = asyncio.run(both())
    assert scores == pytest.approx(bench.score(ids), abs=1e-4)
    assert answers[0].token_ids == bench.generate(asked, SAMPLING)[0].token_ids


def test_giving_one_call_up_leaves_the_others_alone(bench: Bench) -> None:
    asked = requests(bench, 3)

    async def one_goes_away() -> dict[int, Answer]:
        kept = asyncio.create_task(bench.collect(asked, SAMPLING))
        given_up = asyncio.create_task(bench.collect(requests(bench, 9), Sampling(max_new_tokens=60)))
        await asyncio.sleep(0.02)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        return await kept

    found = asyncio.run(one_goes_away())
    assert {key: a.token_ids for key, a in found.items()} == {
        key: a.token_ids for key, a in bench.generate(asked, SAMPLING).items()
    }


def test_weights_come_from_a_published_folder(bench: Bench) -> None:
    ids = ids_of(bench, "What is 12 + 13?")
    bench.nudge(3)
    folder = bench.publish()
    written = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    bench.load_folder(folder)
    assert bench.engine.policy_version == bench.version
    assert bench.score(ids) == pytest.approx(sequence_logprobs(bench.policy.model, list(ids)), abs=2e-3)
    assert bench.generate(requests(bench, 1), SAMPLING)[0].policy_versions == ((bench.version,) * 2,) * 3
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == written


def test_a_damaged_folder_is_refused_and_the_old_weights_serve_on(bench: Bench) -> None:
    ids = ids_of(bench, "What is 12 + 13?")
    before, held = bench.score(ids), bench.engine.policy_version
    damaged = bench.publish()
    file = next(damaged.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    missing = bench.publish()
    manifest_of(missing).unlink()
    for folder in (damaged, missing):
        with pytest.raises(WeightsError, match=folder.name):
            bench.load_folder(folder)
    assert bench.engine.policy_version == held
    assert bench.score(ids) == pytest.approx(before, abs=1e-4)
    assert bench.generate(requests(bench, 1), SAMPLING)[0].policy_versions == ((held, held),) * 3


def test_a_lora_adapter_that_is_zero_is_the_base_and_another_is_not(bench: Bench) -> None:
    if bench.policy.peft is None:
        pytest.skip("of LoRA")
    ids = ids_of(bench, "What is 12 + 13?")
    with bench.policy.peft.disable_adapter():
        base = sequence_logprobs(bench.policy.model, list(ids))
    halves = [p for name, p in bench.policy.model.named_parameters() if ".lora_B." in name]
    kept = [half.detach().clone() for half in halves]
    for half in halves:
        torch.nn.init.zeros_(half)
    bench.load()
    assert bench.score(ids) == pytest.approx(base, abs=1e-3)
    with torch.no_grad():
        for half, values in zip(halves, kept, strict=True):
            half.copy_(values + 0.02)
    bench.load()
    assert max(abs(a - b) for a, b in zip(bench.score(ids), base, strict=True)) > 0.01


def test_death_is_an_error_to_every_call_at_once_and_mending_brings_it_back(bench: Bench) -> None:
    asked, kill = requests(bench, 2), ENGINES[bench.name].kill
    if kill is None:
        pytest.skip("its death has tests of its own")

    async def two_calls() -> list[Any]:
        calls = (bench.collect(asked, SAMPLING), bench.collect(asked, Sampling(max_new_tokens=40)))
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)

    expected = bench.generate(asked, SAMPLING)
    with kill(bench.engine):
        for outcome in asyncio.run(two_calls()):
            assert isinstance(outcome, Exception)
            assert "broken on purpose" in str(outcome)
    assert bench.generate(asked, SAMPLING)[1].token_ids == expected[1].token_ids
