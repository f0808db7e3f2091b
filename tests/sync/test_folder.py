"""The channels that go through a folder, with real weights; which channel a run takes."""

import asyncio
import json
from pathlib import Path

import pytest
import torch

from podium import cli
from podium.engine.inprocess import Inprocess
from podium.errors import InputError, WeightsError
from podium.model.forward import sequence_logprobs
from podium.model.load import Policy, load_policy
from podium.settings.sections import Model
from podium.settings.tables import Settings
from podium.sync import Delivery, Noise
from podium.sync.adapter import Adapter
from podium.sync.disk import Disk

PROBE = list(range(3, 30))


class Standing:
    """What a channel asks of a trainer, over a policy that the test moves."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def weights(self):
        return self.policy.named_weights()

    async def score(self, token_ids):
        return sequence_logprobs(self.policy.model, list(token_ids))


def a_pair(lora: bool) -> tuple[Policy, Inprocess]:
    """Two processes' worth: the engine has a model of its own."""
    table = Model.model_validate({"device": "cpu"} | ({} if lora else {"lora": False}))
    return load_policy(table, seed=0), Inprocess(load_policy(table, seed=5), snapshot=True)


def nudge(policy: Policy) -> None:
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("lora", [True, False], ids=["adapter", "disk"])
def test_weights_arrive_through_the_folder_and_only_two_folders_stay(lora: bool, tmp_path: Path) -> None:
    policy, engine = a_pair(lora)
    delivery = Delivery(Standing(policy), engine, policy, PROBE, Noise("float32"), tmp_path)  # type: ignore[arg-type]
    channel = Adapter(delivery) if lora else Disk(delivery)
    for version in range(4):
        nudge(policy)
        asyncio.run(channel.push(version))
        assert engine.policy_version == version
    folders = [path.name[:14] for path in (tmp_path / "weights").iterdir() if path.is_dir()]
    assert sorted(folders) == ["version-000002", "version-000003"]
    channel.close()
    assert not list((tmp_path / "weights").iterdir()), "a run that has ended leaves no weights behind"


def test_an_engine_that_refuses_a_folder_keeps_its_weights(tmp_path: Path) -> None:
    policy, engine = a_pair(lora=True)
    delivery = Delivery(Standing(policy), engine, policy, PROBE, Noise("float32"), tmp_path)  # type: ignore[arg-type]
    asyncio.run(Adapter(delivery).push(0))
    before = asyncio.run(engine.score(PROBE))
    nudge(policy)
    with torch.no_grad():
        next(p for p in policy.model.parameters() if p.requires_grad)[0, 0] = float("nan")
    with pytest.raises(WeightsError, match="not finite numbers"):
        asyncio.run(Adapter(delivery).push(1))
    assert engine.policy_version == 0
    assert asyncio.run(engine.score(PROBE)) == before


def test_pushes_that_overlap_wait_for_each_other() -> None:
    """Each engine load sleeps; interleaved, the second would begin before the first has ended."""
    policy, engine = a_pair(lora=True)
    log: list[str] = []

    async def slow_load(weights, version):
        log.append(f"begin {version}")
        await asyncio.sleep(0.02)
        engine.policy_version = version
        log.append(f"end {version}")

    async def both() -> None:
        from podium.sync.shared import Shared

        channel = Shared(Delivery(Standing(policy), engine, policy, PROBE, Noise("float32"), Path()))  # type: ignore[arg-type]
        await asyncio.gather(channel.push(1), channel.push(2), channel.push(2))

    asyncio.run(engine.load_weights(policy.named_weights(), 0))
    engine.load_weights = slow_load  # type: ignore[method-assign]
    asyncio.run(both())
    assert log == ["begin 1", "end 1", "begin 2", "end 2"]


RUN = {
    "run": {"steps": 3, "prompts_per_step": 4, "rollouts_per_prompt": 4, "sync_every": 1},
    "model": {"device": "cpu"},
    "rollout": {"max_new_tokens": 24},
    "reward": [{"name": "arithmetic"}],
}


@pytest.mark.parametrize(
    ("lora", "name", "chosen"),
    [(True, "auto", "shared"), (True, "adapter", "adapter"), (False, "disk", "disk"), (False, "auto", "shared")],
)
def test_the_channel_of_a_run(lora: bool, name: str, chosen: str) -> None:
    tables = {**RUN, "model": {"device": "cpu"} | ({} if lora else {"lora": False}), "sync": {"name": name}}
    assert Settings.from_dict(tables).sync.name == chosen


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ({"sync": {"name": "disk"}}, "sync.name = 'disk' is not for LoRA"),
        ({"sync": {"name": "adapter"}, "model": {"lora": False}}, "sync.name = 'adapter' is not for full weights"),
        ({"sync": {"name": "shared", "scope": "run"}}, "scope is not an option"),
        ({"sync": {"name": "pigeon"}}, "sync.name = 'pigeon' is not known"),
    ],
)
def test_a_channel_that_cannot_be_is_refused(tables: dict, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        Settings.from_dict({**RUN, **tables})


def events(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_a_run_through_folders_is_the_run_through_memory(tmp_path: Path) -> None:
    """Same bits: what goes through the adapter's folder is what the shared channel lays over the base."""
    settings = tmp_path / "s.toml"
    settings.write_text(
        "[run]\nsteps = 3\nprompts_per_step = 4\nrollouts_per_prompt = 4\n[model]\ndevice = 'cpu'\n[rollout]\n"
        "max_new_tokens = 24\n[trainer]\nlr = 5e-4\n"
        "[[data]]\nname = 'arithmetic'\nmax_rows = 1000\n[[reward]]\nname = 'arithmetic'\n"
    )
    for name in ("shared", "adapter"):
        flags = [f"--run.folder={tmp_path / name}", f"--sync.name={name}"]
        assert cli.main(["train", str(settings), *flags, "--quiet"]) == 0
    pushed = [line for line in events(tmp_path / "adapter") if line["event"] == "pushed"]
    assert [(line["policy_version"], line["channel"]) for line in pushed] == [(k, "adapter") for k in range(4)]
    weights = [(tmp_path / name / "final" / "adapter_model.safetensors").read_bytes() for name in ("shared", "adapter")]
    assert weights[0] == weights[1]


def test_scope_engine_needs_an_engine_that_outlives_the_run(tmp_path: Path) -> None:
    policy, engine = a_pair(lora=True)
    with pytest.raises(InputError, match=r"sync\.scope = 'engine' has no effect"):
        Adapter(Delivery(Standing(policy), engine, policy, PROBE, Noise("float32"), tmp_path), scope="engine")  # type: ignore
