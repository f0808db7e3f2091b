"""Shared fixtures: small settings of the embedded task, and a run of them."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: small models gain nothing from a second thread

import pytest

from podium.settings import Settings

for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # a shell that starts the tests in the background has them ignored,
        signal.signal(number, usual)  # and so would every process that a test starts


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


def small_tables(folder: Path, **run: Any) -> dict[str, Any]:
    """A run of seconds: 4 prompts × 4 rollouts a step."""
    return {
        "run": {"folder": str(folder), "steps": 4, "prompts_per_step": 4, "rollouts_per_prompt": 4, **run},
        "model": {"name": "embedded", "device": "cpu"},
        "data": [{"name": "arithmetic"}],
        "reward": [{"name": "arithmetic"}],
        "rollout": {"max_new_tokens": 24},
        "trainer": {"lr": 5e-4},
        "checkpoint": {"every": 2},
        "report": [{"name": "console", "mode": "quiet"}],
    }


@pytest.fixture
def small(tmp_path: Path) -> Settings:
    return Settings.from_dict(small_tables(tmp_path / "run"))
