"""Shared fixtures: small settings of the embedded task, and a run of them."""

import gc
import getpass
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: small models gain nothing from a second thread
# What vLLM compiles is compiled once, also by processes that have another folder for temporary files.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")

import pytest

from podium.settings.tables import Settings

for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # a shell that starts the tests in the background has them ignored,
        signal.signal(number, usual)  # and so would every process that a test starts


def holds_files(place: Path) -> bool:
    """Whether tests have room there, and may start what they write there."""
    if not os.access(place, os.W_OK) or os.statvfs(place).f_flag & os.ST_NOEXEC:
        return False
    return shutil.disk_usage(place).free > 4 << 30


if holds_files(MEMORY := Path("/dev/shm")):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))  # on a disk, runs wait at every commit


RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables by which libraries know that they are one process of several."""


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    """A test that plays a rank in this process makes none of the tests after it."""
    before = {name: os.environ[name] for name in RANKS if name in os.environ}
    yield
    for name in RANKS:
        os.environ.pop(name, None)
    os.environ.update(before)


LONGEST = (
    "runtime/test_ray.py",
    "runtime/test_trainers.py",
    "runtime/test_ranks.py",
    "trainer/test_sharded.py",
    "trainer/test_ranks.py",
    "engine/test_contract.py",
    "engine/test_vllm_local.py",
    "engine/test_vllm_experts.py",
    "engine/test_vllm_steps.py",
    "test_calibrate.py",
    "assets/test_embedded.py",
    "sync/test_faults.py",
    "test_export_vllm.py",
    "sync/test_nccl.py",
    "engine/test_pool_faults.py",
    "chaos/test_kills.py",
    "test_docs.py",
    "chaos/test_async.py",
    "test_examples.py",
    "test_workbench.py",
    "test_rewards_in_a_run.py",
    "reward/test_reasoning_gym.py",
    "chaos/test_equal_resumes.py",
    "test_resume.py",
    "test_fuzzed_settings.py",
    "chaos/test_faults.py",
    "test_checkpoint.py",
    "engine/test_captured.py",
    "model/test_families.py",
    "report/test_tracker.py",
    "trainer/test_single.py",
    "server/test_serve.py",
    "test_async_run.py",
    "runtime/test_flyte.py",
    "test_lost_folder.py",
    "runtime/test_users_stages.py",
    "runtime/test_build.py",
    "test_cli.py",
    "reward/test_hostile.py",
    "test_terminal.py",
    "test_push.py",
    "reward/sandbox/test_run.py",
    "test_api.py",
    "test_checks.py",
    "runtime/test_memory.py",
    "engine/test_pool.py",
    "test_supply_chain.py",
    "report/test_browser.py",
    "reward/isolation/test_workers.py",
    "test_demo.py",
    "test_same_bytes.py",
    "runtime/test_reference.py",
    "test_export.py",
    "model/test_load.py",
    "server/test_abuse.py",
    "chaos/test_signals.py",
    "server/test_under_load.py",
    "model/test_device_thread.py",
)
"""Files of half a minute and more, the longest first, as --durations tells: what is begun last must be short, so that
all processes of `make test` end at about the same time."""


TOGETHER = {
    "vllm": (
        *("engine/test_contract.py", "engine/test_vllm_local.py", "engine/test_vllm_experts.py", "test_calibrate.py"),
        *("engine/test_vllm_steps.py", "sync/test_faults.py", "sync/test_nccl.py", "assets/test_embedded.py"),
        *("test_export_vllm.py", "engine/test_pool_faults.py"),
    ),
    "deepspeed": (
        "runtime/test_trainers.py",
        "runtime/test_ranks.py",
        "trainer/test_sharded.py",
        "trainer/test_ranks.py",
    ),
}
"""Files that one process of `make test` runs one after the other: what they share takes long to import. They stand
together in LONGEST."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files to processes, as `--dist loadfile` does, but for those that belong together."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    group = {f"tests/{file}": name for name, files in TOGETHER.items() for file in files}

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return group.get(file, file)

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}
    here = Path(__file__).parent
    items.sort(key=lambda item: place.get(item.path.relative_to(here).as_posix(), len(place)))


def pytest_collection_finish() -> None:
    """Every run in this process would otherwise collect garbage among all that the tests have imported."""
    gc.collect()
    gc.freeze()


def small_tables(folder: Path, **run: Any) -> dict[str, Any]:
    """A run of seconds: 4 prompts × 4 rollouts a step. All rows of the data would take as long as the run."""
    return {
        "run": {"folder": str(folder), "steps": 4, "prompts_per_step": 4, "rollouts_per_prompt": 4, **run},
        "model": {"name": "embedded", "device": "cpu"},
        "data": [{"name": "arithmetic", "max_rows": 1000}],
        "reward": [{"name": "arithmetic"}],
        "rollout": {"max_new_tokens": 24},
        "trainer": {"lr": 5e-4},
        "checkpoint": {"every": 2},
        "report": [{"name": "console"}],
    }


@pytest.fixture
def small(tmp_path: Path) -> Settings:
    return Settings.from_dict(small_tables(tmp_path / "run"))
