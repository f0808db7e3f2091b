"""The real checkpoint around a trainer of one tensor: small enough that each of its system calls can be broken."""

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from podium.errors import PodiumError
from podium.records import RunState
from podium.run.checkpoint import FolderCheckpoint
from podium.run.folder import Ledger, RunFolder


class OneTensor:
    """All that a checkpoint asks of a trainer."""

    def __init__(self, gate: Path | None = None) -> None:
        self.tensor, self._gate = torch.zeros(64), gate

    def state(self) -> dict[str, torch.Tensor]:
        """Says that it is at the gate and waits there: all that comes after it is the commit."""
        if self._gate is not None:
            self._gate.with_suffix(".ready").touch()
        while self._gate is not None and not self._gate.exists():
            time.sleep(0.005)
        return {"weights.w": self.tensor.clone()}

    def load_state(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensor = tensors["weights.w"]


def a_checkpoint(path: Path, trainer: Any, **options: Any) -> tuple[FolderCheckpoint, Ledger]:
    folder = RunFolder(path)
    ledger = Ledger(folder)
    return FolderCheckpoint(folder, trainer, ledger, "data", "", **({"every": 1, "keep": 1} | options)), ledger


async def one_step(path: Path, gate: Path | None = None) -> None:
    """Restores, writes the next step to the ledger, commits it."""
    trainer = OneTensor(gate)
    checkpoint, ledger = a_checkpoint(path, trainer)
    state = await checkpoint.restore_or_start()
    step = state.step + 1
    trainer.tensor += 1
    ledger.add_line({"step": step})
    ledger.add_rollouts(step, [{"ordinal": step}])
    await checkpoint.commit(RunState(step=step, policy_version=step))


def make_run(path: str, steps: int) -> None:
    Path(path).mkdir(parents=True)
    for _ in range(steps):
        asyncio.run(one_step(Path(path)))


def step_when_told(path: str) -> int:
    """Before the commit it waits for the file `go`, so that a tracer can take hold of it. 1: a named error."""
    try:
        asyncio.run(one_step(Path(path), Path(f"{path}.go")))
    except (PodiumError, OSError) as error:
        with suppress(OSError):  # the fault may be meant for this write
            print(f"{type(error).__name__}: {error}", flush=True)
        return 1
    return 0


def restored(path: Path) -> tuple[int, float, list[int]]:
    """Step, weight and ledger of what a resume finds, if it trusts it."""
    trainer = OneTensor()
    checkpoint, ledger = a_checkpoint(path, trainer)
    state = asyncio.run(checkpoint.restore_or_start())
    return state.step, float(trainer.tensor[0]), [line["step"] for line in ledger.history()]
