"""What commits cost: time, bytes, proof, and how long training waits.

python benchmarks/checkpoint.py [--out results.json] [--megabytes 256]

Two parts. A state of so many megabytes is committed alone: seconds to write and flush it, to read it back and compare,
to prove it by its hashes as a resume does, and that the loop was kept waiting (copying only). Then the embedded model
trains the same steps with a commit a step and with none, taking turns, and the steps' wall times are compared.
"""

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from podium.records import RunState
from podium.run.checkpoint import FolderCheckpoint, find_damage
from podium.run.folder import Ledger, RunFolder
from podium.run.start import train
from podium.settings.tables import Settings

ROUNDS = 5
STEPS = 40


class Plain:
    """A trainer's state of a given size: a third weights, two thirds moments."""

    def __init__(self, megabytes: float) -> None:
        count = int(megabytes * 1e6 / 4 / 3)
        self._tensors = {
            name: torch.randn(count) for name in ("weights.w", "optimizer.w.exp_avg", "optimizer.w.square")
        }

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self._tensors.items()}


async def commits(megabytes: float, folder: Path) -> dict[str, float]:
    """Medians over a few commits of one state."""
    run = RunFolder(folder)
    folder.mkdir()
    trainer: Any = Plain(megabytes)
    checkpoint = FolderCheckpoint(run, trainer, Ledger(run), "data", "", every=1, keep=2)
    stalls, waits, hashes = [], [], []
    for step in range(1, ROUNDS + 2):
        started = time.monotonic()
        await checkpoint.commit_if_due(RunState(step=step))
        stalls.append(time.monotonic() - started)
        await checkpoint.commit(RunState(step=step))
        waits.append(time.monotonic() - started)
        started = time.monotonic()
        assert find_damage(run.checkpoints / f"step-{step:06d}") is None
        hashes.append(time.monotonic() - started)
    events = list(run.events_of("committed"))[1:]
    save, proof = median(event["seconds"] for event in events), median(event["verify_s"] for event in events)
    return {
        "bytes": events[0]["bytes"],
        "save_s": save,
        "verify_s": proof,
        "verify_per_save": proof / save,
        "hash_on_resume_s": median(hashes[1:]),
        "stall_s": median(stalls[1:]),
        "whole_s": median(waits[1:]),
    }


def steps_of(folder: Path, every: int) -> list[float]:
    """Seconds from the end of one step to the end of the next."""
    tables = {
        "run": {"folder": str(folder), "steps": STEPS, "prompts_per_step": 8, "rollouts_per_prompt": 8},
        "model": {"device": "cpu"},
        "data": [{"name": "arithmetic", "max_rows": 400}],
        "reward": [{"name": "arithmetic"}],
        "rollout": {"max_new_tokens": 24},
        "checkpoint": {"every": every},
        "report": [{"name": "console"}],
    }
    train(Settings.from_dict(tables))
    ends = [event["time"] for event in RunFolder(folder).events_of("trained")]
    return [later - earlier for earlier, later in pairwise(ends[5:])]


def loop(scratch: Path) -> dict[str, float]:
    """The two kinds of run take turns, so that a machine that slows down slows both; lower quartiles, which other
    programs on it disturb least."""
    times: dict[int, list[float]] = {0: [], 1: []}
    for number in range(ROUNDS):
        for every in (0, 1) if number % 2 else (1, 0):
            times[every] += steps_of(scratch / f"run-{number}-{every}", every)
    without, with_ = (quantiles(times[every], n=4)[0] for every in (0, 1))
    return {"step_s_without": without, "step_s_every_1": with_, "slower": with_ / without - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--megabytes", type=float, nargs="*", default=[1, 256])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        results: dict[str, Any] = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
            "commit": {
                f"{size:g} MB": asyncio.run(commits(size, Path(scratch) / f"{size}")) for size in given.megabytes
            },
            "loop": loop(Path(scratch)),
        }
    text = json.dumps(results, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
