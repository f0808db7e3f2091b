"""What the runtime puts around an engine."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from podium.runtime._engine import TrainsAlone, make_engine
from tests.runtime.test_memory import settings_of


class Noted:
    """An engine and a trainer in one, noting what is called."""

    lr = 0.5

    def __init__(self, fails: bool = False) -> None:
        self.called: list[str] = []
        self.fails = fails

    async def sleep(self) -> None:
        self.called.append("sleep")

    async def wake(self) -> None:
        self.called.append("wake")

    async def step(self, batches: list[Any]) -> str:
        self.called.append("step")
        if self.fails:
            raise RuntimeError("out of memory")
        return "result"


def test_the_engine_sleeps_while_the_trainer_steps_and_only_then() -> None:
    noted = Noted()
    trainer = TrainsAlone(noted, noted)
    assert trainer.lr == 0.5
    assert noted.called == []
    assert asyncio.run(trainer.step([])) == "result"
    assert noted.called == ["sleep", "step", "wake"]


def test_the_engine_wakes_after_a_step_that_failed() -> None:
    noted = Noted(fails=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        asyncio.run(TrainsAlone(noted, noted).step([]))
    assert noted.called == ["sleep", "step", "wake"]


@pytest.mark.parametrize(("run", "overlaps"), [({}, False), ({"sync_every": 2}, False), ({"max_lag": 1}, True)])
def test_an_engine_is_handed_the_trainers_precision_and_whether_both_work_at_the_same_time(
    run: dict[str, Any], overlaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[Any] = []

    class Handed:
        def __init__(self, policy: Any, snapshot: bool, compute_dtype: Any, overlaps: bool) -> None:
            handed.extend([snapshot, compute_dtype, overlaps])

    monkeypatch.setattr("podium.runtime._engine.find", lambda kind, name: Handed)
    settings = settings_of(tmp_path, run=run, trainer={"precision": "bfloat16"})
    make_engine(settings, policy=cast(Any, None), snapshot=settings.plan.needs_snapshot)
    assert handed == [bool(run), torch.bfloat16, overlaps]
