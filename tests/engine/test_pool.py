"""The pool as a whole: its settings, and runs that learn with it."""

import asyncio
import fcntl
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

import podium.engine.pool as pool_module
from podium.engine.pool import Pool, PoolFolder, hold, sweep
from podium.errors import EngineError, InputError, ParityError
from podium.model import device_thread
from podium.model.handoff import publish, read_published, remove_published
from podium.model.load import load_policy
from podium.records import EngineTraits
from podium.remote.tasks import LoopThread
from podium.run.start import train
from podium.settings.tables import Model, Settings
from podium.sync import Noise, check_parity
from tests.conftest import small_tables


def pool_settings(folder: Path, **engine: Any) -> Settings:
    return Settings.from_dict(small_tables(folder) | {"engine": {"name": "pool", **engine}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": ["unix:/x"], "replicas": [1, 2]}, r"engine\.replicas has no effect"),
        ({"urls": ["unix:/x"], "member": {"concurrency": 4}}, r"engine\.member has no effect"),
        ({"token_file": "token"}, r"engine\.token_file has no effect without engine\.urls"),
        ({"replicas": [3, 2]}, r"engine\.replicas = \[3, 2\]: the fewest come first"),
        ({"replicas": [2, 2], "idle_s": 5}, r"engine\.idle_s has no effect"),
        ({"floor": 3}, r"engine\.floor = 3: the pool has at most 2 members"),
        ({"member": {"colour": 4}}, r"engine\.member\.colour is not an option.*concurrency"),
        ({"of": "vllm_local", "member": {"sleep": True}}, r"engine\.member\.sleep has no effect"),
        ({"of": "pool"}, r"engine\.of"),
        ({"concurrency": "quick"}, r"engine\.concurrency"),
    ],
)
def test_what_cannot_be_right_is_refused_before_the_model_is_loaded(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        pool_settings(tmp_path, **options)


@pytest.mark.parametrize(("lora", "channel"), [(True, "adapter"), (False, "disk")])
def test_the_channel_follows_what_is_trained(tmp_path: Path, lora: bool, channel: str) -> None:
    tables = small_tables(tmp_path)
    tables["model"]["lora"] = lora
    assert Settings.from_dict(tables | {"engine": {"name": "pool"}}).sync.name == channel


@pytest.mark.parametrize("lora", [True, False])
def test_a_run_learns_as_it_does_in_process(tmp_path: Path, lora: bool) -> None:
    """The same rollouts but for rounding, which depends on the batches that they are written in."""
    rows = {}
    for name in ("inprocess", "pool"):
        tables = small_tables(tmp_path / name, steps=3)
        tables["model"]["lora"] = lora
        tables["trainer"] = {"lr": 5e-4 if lora else 1e-5}
        train(Settings.from_dict(tables | {"engine": {"name": name}}))
        files = sorted((tmp_path / name / "rollouts").iterdir())
        rows[name] = [
            [line.split(b'"text"')[1].split(b'"advantage"')[0] for line in f.read_bytes().splitlines()] for f in files
        ]
    assert len(rows["pool"]) == 3
    assert rows["pool"] == rows["inprocess"]


def test_an_answer_to_whoever_is_gone_is_no_error_of_the_pool_s_thread(caplog: pytest.LogCaptureFixture) -> None:
    thread = LoopThread()

    async def late() -> None:
        loop = asyncio.get_running_loop()
        gone = loop.create_future()
        gone.cancel()
        loop.call_soon(gone.set_result, None)
        loop.call_soon(int, "a mistake")

    asyncio.run(thread.call(late()))
    thread.finish(asyncio.sleep(0), 10)
    [told] = caplog.records
    assert "a mistake" in str(told.exc_info and told.exc_info[1])


def test_no_worker_starts_before_weights_are_handed_over_and_a_pool_that_got_none_leaves_nothing() -> None:
    policy = load_policy(Model.model_validate({"device": "cpu"}), seed=0)
    pool = Pool(policy)
    assert not pool._pool.replicas
    pool.close()
    assert not pool._folder.path.exists()


class Several:
    """Two members, one of them with other weights."""

    policy_version = 3
    traits = EngineTraits(channels=("disk",), has_members=True)

    async def score_each(self, token_ids: Any) -> dict[str, list[float]]:
        return {"worker-1.1": [-1.0, -1.0], "worker-2.4": [-1.0, -1.5]}


class Certain:
    async def score(self, token_ids: Any) -> list[float]:
        return [-1.0, -1.0]


def test_a_member_without_the_trained_weights_is_named() -> None:
    trainer: Any = Certain()
    engine: Any = Several()

    async def compare(held: Any) -> str | None:
        return None

    with pytest.raises(ParityError, match=r"engine Several, member worker-2\.4, does not sample from the trained"):
        asyncio.run(check_parity(trainer, engine, [1, 2, 3], 3, Noise("float32"), compare))


def test_the_folder_is_private_and_swept_away_once_nobody_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    folder = PoolFolder()
    try:
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        sweep(folder.path.parent)
        assert folder.path.is_dir()
        fcntl.flock(folder._lock, fcntl.LOCK_UN)
        sweep(folder.path.parent)
        assert not folder.path.exists()
    finally:
        folder.remove()


def test_held_weights_outlive_the_published_ones(tmp_path: Path) -> None:
    policy = load_policy(Model.model_validate({"device": "cpu"}), seed=0)
    published = publish(tmp_path, policy, policy.named_weights(), 4)
    held = tmp_path / "held"
    hold(published, held)
    remove_published(published)
    assert set(read_published(held, dict(policy.named_weights()), 4)) == set(dict(policy.named_weights()))


def test_the_workers_share_the_threads_of_the_runs_team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    class Seen(pool_module.ForkServer):
        def __init__(self, recipe: str, arguments: dict[str, Any], **options: Any) -> None:
            given.append(arguments["threads"])
            super().__init__(recipe, arguments, **options)

    monkeypatch.setattr(pool_module, "ForkServer", Seen)
    before = torch.get_num_threads()
    device_thread.set_num_threads(4)
    try:
        train(pool_settings(tmp_path / "run", replicas=[2, 2]))
    finally:
        device_thread.SHARED.set_team(before)
        device_thread.set_num_threads(before)
    assert given == [2]  # of the four, though the thread that asks has one


def test_processes_of_its_own_need_fastapi_which_is_said_before_any_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(Model.model_validate({"device": "cpu"}), seed=0)
    monkeypatch.setattr(pool_module, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"need FastAPI: pip install 'podium-rl\[server\]'"):
        Pool(policy)
    with pytest.raises(EngineError, match="cannot be reached"):  # of servers elsewhere it asks nothing but an answer
        Pool(policy, urls=["http://127.0.0.1:1"])
