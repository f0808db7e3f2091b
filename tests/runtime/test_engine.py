"""What the runtime puts around an engine."""

import asyncio
from typing import Any

import pytest

from podium.runtime._engine import TrainsAlone


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
