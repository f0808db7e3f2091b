"""What every engine must do, asked of each in turn: full weights and LoRA, on the real embedded model."""

import asyncio
import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.check.engine_contract import CHECKS, MAX_S, Bench, Check, ContractError, check_engine
from podium.errors import InputError, WeightsError
from podium.model.forward import sequence_logprobs
from podium.model.handoff import manifest_of, publish
from podium.model.load import Policy, load_policy
from podium.records import Answer, Request, Sampling
from podium.settings.lookup import find
from podium.settings.tables import Model
from tests.commands import VLLM
from tests.engine.user_engine import MyEngine
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
        modules = VLLM if inner == "vllm_local" else ()
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(Path(folder), "--engine", inner, "--model.device=cpu", *flags, modules=modules) as server,
            closing(find("engine", "vllm_server")(policy, **server.engine_options)) as engine,
        ):
            yield engine

    return start


@contextmanager
def no_next_token(engine: Any) -> Iterator[None]:
    """Writing a token fails, as it does when a GPU is lost, until the block ends."""
    owner, name = (engine._engine, "step") if hasattr(engine, "_engine") else (engine._plain, "run")

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
    lora: tuple[bool, ...] = (False, True)
    """One of them where engine and transport have shown the other one already, each by itself."""


ENGINES = {
    "inprocess": Row(in_this_process("inprocess"), no_next_token),
    "vllm_local": Row(in_this_process("vllm_local", eager=True, concurrency=16), no_next_token, needs="vllm"),
    "vllm_server over inprocess": Row(behind_a_server("inprocess")),
    "vllm_server over vllm_local": Row(
        behind_a_server("vllm_local", eager=True, concurrency=16), needs="vllm", lora=(True,)
    ),
    "pool of inprocess": Row(in_this_process("pool")),
    "pool of vllm_local": Row(
        in_this_process("pool", of="vllm_local", replicas=(1, 1), member={"eager": True, "concurrency": 16}),
        needs="vllm",
        lora=(False,),
    ),
    "a user's engine": Row(in_this_process(f"{Path(__file__).parent}/user_engine.py:MyEngine")),
}


@dataclass
class Tried(Bench):
    """An engine under test, for tests that are no coroutines."""

    name: str = ""
    folder: Path = Path()

    def load_now(self) -> None:
        asyncio.run(self.load())

    def publish(self) -> Path:
        root = self.engine.traits.weights_root or self.folder
        return publish(root, self.policy, self.policy.named_weights(), self.version + 1)

    def load_folder(self, folder: Path) -> None:
        asyncio.run(self.engine.load_folder(folder, self.version + 1))
        self.version += 1

    def generate(self, asked: list[Request]) -> list[Answer]:
        return asyncio.run(self.answers(asked))

    def score(self, ids: tuple[int, ...]) -> list[float]:
        return asyncio.run(self.engine.score(ids))

    def nudge(self, seed: int, scale: float = 0.02) -> None:
        """Changes what is trained, as an optimizer step would."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.policy.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(scope="module", params=[(name, lora) for name, row in ENGINES.items() for lora in row.lora], ids=str)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tried]:
    name, lora = request.param
    row = ENGINES[name]
    if row.needs is not None and importlib.util.find_spec(row.needs) is None:
        pytest.skip(f"{row.needs} is not installed")
    policy = load_policy(Model.model_validate({"device": "cpu"} | ({} if lora else {"lora": False})), seed=0)
    with row.start(policy) as engine:
        made = Tried(engine, policy, name=name, folder=tmp_path_factory.mktemp("weights"))
        made.load_now()
        yield made


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(bench: Tried, check: Check) -> None:
    asyncio.run(asyncio.wait_for(check(bench), MAX_S))


SAMPLING = Sampling(max_new_tokens=24, stop_ids=(EOS,))


def test_a_prompt_may_fill_the_context(bench: Tried) -> None:
    ids = tuple(bench.ids("What is 12 + 13?") * 40)[: bench.policy.max_context_tokens - 8]
    request = Request(ids, Sampling(max_new_tokens=8), 5)
    [answer] = bench.generate([request])
    assert len(answer.token_ids) == 8
    assert answer.logprobs == pytest.approx(bench.expected(request, answer), abs=2e-3)


@pytest.mark.parametrize("excess", [1, 100])
def test_a_prompt_too_long_for_its_answer_is_refused_with_the_context(bench: Tried, excess: int) -> None:
    ids = tuple(bench.ids("What is 12 + 13?") * 60)[: bench.policy.max_context_tokens - 8 + excess]
    with pytest.raises(InputError, match=f"context (has|of) {bench.policy.max_context_tokens}"):
        bench.generate([*bench.requests(2), Request(ids, Sampling(max_new_tokens=8), 5)])
    assert len(bench.generate(bench.requests(2))) == 2


def test_new_weights_are_used_at_once_and_the_version_moves(bench: Tried) -> None:
    asked = bench.requests(3, SAMPLING, group="train/1")
    ids = bench.ids("What is 12 + 13?")
    before = bench.score(ids)
    bench.generate(asked)  # leaves the prompt in the prefix cache
    for seed in (1, 2):
        bench.nudge(seed)
        bench.load_now()
        for request, answer in zip(asked, bench.generate(asked), strict=True):
            assert answer.policy_versions == (bench.version,) * 2
            assert answer.logprobs == pytest.approx(bench.expected(request, answer), abs=2e-3)
        assert bench.engine.policy_version == bench.version
        after = bench.score(ids)
        assert after == pytest.approx(sequence_logprobs(bench.policy.model, list(ids)), abs=2e-3)
        assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 0.01
        before = after


def test_weights_come_from_a_published_folder(bench: Tried) -> None:
    skip_without_folders(bench)
    ids = bench.ids("What is 12 + 13?")
    bench.nudge(3)
    folder = bench.publish()
    written = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    bench.load_folder(folder)
    assert bench.engine.policy_version == bench.version
    assert bench.score(ids) == pytest.approx(sequence_logprobs(bench.policy.model, list(ids)), abs=2e-3)
    assert bench.generate(bench.requests(1))[0].policy_versions == (bench.version,) * 2
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == written


def skip_without_folders(bench: Tried) -> None:
    if not {"adapter", "disk"} & set(bench.engine.traits.channels):
        pytest.skip("no channel reaches it by a folder")


def test_a_damaged_folder_is_refused_and_the_old_weights_serve_on(bench: Tried) -> None:
    skip_without_folders(bench)
    ids = bench.ids("What is 12 + 13?")
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
    assert bench.generate(bench.requests(1))[0].policy_versions == (held, held)


def test_a_lora_adapter_that_is_zero_is_the_base_and_another_is_not(bench: Tried) -> None:
    if bench.policy.peft is None:
        pytest.skip("of LoRA")
    ids = bench.ids("What is 12 + 13?")
    with bench.policy.peft.disable_adapter():
        base = sequence_logprobs(bench.policy.model, list(ids))
    halves = [p for name, p in bench.policy.model.named_parameters() if ".lora_B." in name]
    kept = [half.detach().clone() for half in halves]
    for half in halves:
        torch.nn.init.zeros_(half)
    bench.load_now()
    assert bench.score(ids) == pytest.approx(base, abs=1e-3)
    with torch.no_grad():
        for half, values in zip(halves, kept, strict=True):
            half.copy_(values + 0.02)
    bench.load_now()
    assert max(abs(a - b) for a, b in zip(bench.score(ids), base, strict=True)) > 0.01


def test_death_is_an_error_to_every_call_at_once_and_mending_brings_it_back(bench: Tried) -> None:
    asked, kill = [*bench.requests(3, SAMPLING), *bench.requests(3)], ENGINES[bench.name].kill
    if kill is None:
        pytest.skip("its death has tests of its own")

    async def every_call() -> list[Any]:
        calls = (bench.engine.generate(request) for request in asked)
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)

    expected = [answer.token_ids for answer in bench.generate(asked)]
    with kill(bench.engine):
        for outcome in asyncio.run(every_call()):
            assert isinstance(outcome, Exception)
            assert "broken on purpose" in str(outcome)
    assert [answer.token_ids for answer in bench.generate(asked)] == expected


def test_closing_ends_every_call_with_an_answer_or_an_error(bench: Tried) -> None:
    """The last test of each engine, which is of no use afterwards."""

    async def close_under_way() -> list[Any]:
        calls = [asyncio.ensure_future(bench.engine.generate(request)) for request in bench.requests(3)]
        await asyncio.sleep(0.01)
        bench.engine.close()
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)

    for outcome in asyncio.run(close_under_way()):
        assert isinstance(outcome, Answer | Exception)


class Deaf(MyEngine):
    """Breaks two rules: every answer has the same seed, and `on_tokens` is never called."""

    async def generate(self, request, on_tokens=None):
        return await super().generate(replace(request, seed=1))


def test_every_broken_rule_is_listed() -> None:
    policy = load_policy(Model.model_validate({"device": "cpu", "lora": False}), seed=0)
    with pytest.raises(ContractError) as caught:
        asyncio.run(check_engine(Deaf(policy), policy))
    lines = str(caught.value).splitlines()
    assert lines[0] == "Deaf breaks 2 rules:"
    assert lines[1].startswith("the_seed_decides_the_tokens: different seeds of one prompt gave the same tokens")
    assert lines[2].startswith("on_tokens_receives_the_whole_answer: on_tokens got 0 of 24 tokens")
