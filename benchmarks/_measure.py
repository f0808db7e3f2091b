"""What things cost on this machine: the parts of a run of the embedded model, and whole runs to compare with.

Parts are taken one by one with one worker, in seconds of CPU, so that what else the machine does counts little. Whole
runs are wall time; a canary beside them measures how much of a core a process gets meanwhile.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import tomli_w
from _simulator.lengths import Observed, lengths_of_run
from _simulator.scenario import Costs
from _simulator.workers import seconds_by_group

ROLLOUTS_PER_PROMPT = 8
MAX_NEW_TOKENS = 24
STAGES = ("rollout", "pack", "train", "report", "sync", "eval", "checkpoint")
"""Their seconds add up to the wall time of a step."""
WARM_UP = 5
"""Steps of a run that are not measured: the first flight, first calls."""
PROMPTS_PER_REQUEST = 4
"""The pool's, for in-process members."""
QUESTIONS = 10
PUSH = ("worker_s", "driver_s", "ask_s")


def work(prompts: int, steps: int, workers: int, max_lag: int) -> dict[str, Any]:
    """The embedded model at a rate that leaves it where it is, so that all steps cost alike."""
    return {
        "run": {
            "steps": steps,
            "prompts_per_step": prompts,
            "rollouts_per_prompt": ROLLOUTS_PER_PROMPT,
            "max_lag": max_lag,
        },
        "model": {"name": "embedded", "device": "cpu"},
        "engine": {"name": "pool", "replicas": [workers, workers]},
        "rollout": {"max_new_tokens": MAX_NEW_TOKENS},
        "filter": {"accept": "all"},
        "trainer": {"lr": 1e-6},
        "checkpoint": {"every": 0},
        "reward": [{"name": "arithmetic"}],
        "report": [{"name": "console"}],
    }


@dataclass(frozen=True)
class Run:
    """What a whole run took, over its measured steps."""

    prompts: int
    workers: int
    max_lag: int
    step_s: float
    """The mean."""
    stretch: float
    """Seconds that a second of CPU took a process beside the run, on average; 1 where there are cores to spare."""


def measure_run(folder: Path, prompts: int, workers: int, max_lag: int, steps: int) -> tuple[Run, Observed]:
    """A run in a process of its own."""
    tables = work(prompts, steps, workers, max_lag)
    tables["run"]["folder"] = str(folder)
    settings = folder.with_suffix(".toml")
    settings.write_text(tomli_w.dumps(tables))
    command = [sys.executable, "-m", "podium.cli", "train", str(settings)]
    metrics, bursts = folder / "metrics.jsonl", folder.with_suffix(".canary")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= WARM_UP):
            time.sleep(0.1)
        with canary(bursts):
            process.wait()
    stretches = [float(line) for line in bursts.read_text().splitlines(keepends=True) if line.endswith("\n")]
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()][WARM_UP:]
    step_s = fmean(sum(line[f"time/{name}_s"] for name in STAGES) for line in lines)
    return Run(prompts, workers, max_lag, step_s, fmean(stretches)), lengths_of_run(folder)


@contextmanager
def canary(bursts: Path) -> Iterator[None]:
    """Every process of a run has a session of its own, as Linux deals cores out to sessions; so has the canary."""
    command = [sys.executable, str(Path(__file__).with_name("_canary.py"))]
    with bursts.open("w") as file, subprocess.Popen(command, stdout=file, start_new_session=True) as process:
        try:
            yield
        finally:
            process.kill()


def _cpu_s(pid: int) -> float:
    """Of a process, all threads."""
    stats = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(stat.split()[0]) for stat in stats) / 1e9


@dataclass(frozen=True)
class Lot:
    """Prompts that were sent together and trained, and the CPU seconds of each part."""

    lengths: list[list[int]]
    tokens: int
    """Of prompts and answers, each prompt counted with each answer."""
    worker_s: float
    driver_s: float
    """Until all groups were there, with rewards and advantages."""
    pack_s: float
    train_s: float
    report_s: float


@dataclass(frozen=True)
class Push:
    worker_s: float
    driver_s: float
    wall_s: float
    ask_s: float
    """Of the driver, for a question to one worker alone."""


def measure_parts(folder: Path, repeats: int) -> tuple[list[Lot], list[Push]]:
    """Through the stages of a real run with one worker."""
    from podium.run.folder import RunFolder
    from podium.runtime.local import local
    from podium.runtime.wiring.stages import wire
    from podium.settings.tables import Settings

    tables = work(16, 1, 1, 0)
    tables["run"]["folder"] = str(folder)
    settings = Settings.from_dict(tables).resolve()
    place = RunFolder(folder)
    wired = wire(settings, place, local(settings, place, None), lambda: False, None, "quiet")
    place.create()
    try:
        return asyncio.run(_parts(wired.stages, wired.engine, place, repeats))
    finally:
        wired.engine.close()
        place.unlock()


async def _parts(stages: Any, engine: Any, place: Any, repeats: int) -> tuple[list[Lot], list[Push]]:
    from podium.records import RunState

    await stages.report.start(RunState())
    await stages.sync.push(0)
    pid = next(iter(place.events_of("worker_started")))["pid"]
    lots, pushes, state = [], [], RunState()
    for _ in range(repeats):
        for prompts in (1, 2, 4, 8, 16):
            lot, state = await _lot(stages, pid, state, prompts)
            lots.append(lot)
        worker, driver, wall = _cpu_s(pid), time.process_time(), time.monotonic()
        await stages.sync.push(state.policy_version)
        taken = _cpu_s(pid) - worker, time.process_time() - driver, time.monotonic() - wall
        driver = time.process_time()
        for _ in range(QUESTIONS):
            await engine.score_each([1, 2, 3, 4])
        pushes.append(Push(*taken, (time.process_time() - driver) / QUESTIONS))
    return lots[5:], pushes[1:]  # first calls are no measure


async def _lot(stages: Any, pid: int, state: Any, prompts: int) -> tuple[Lot, Any]:
    from podium.records import StepGroups

    worker, laps = _cpu_s(pid), [time.process_time()]
    scored = stages.reward.score_each(stages.rollout(stages.data.draw(state, prompts)))
    groups = [each async for group in scored for each in stages.filter(stages.assign_advantages([group]))]
    worker_s = _cpu_s(pid) - worker
    laps.append(time.process_time())
    batches = stages.pack(groups)
    laps.append(time.process_time())
    result = await stages.train(batches)
    laps.append(time.process_time())
    step = StepGroups(prompts).plus(groups, groups)
    state = stages.data.advance(state, step.drawn).after(step, result)
    await stages.report.write(state, step, result, {})
    laps.append(time.process_time())
    lengths = [[len(rollout.token_ids) for rollout in group.rollouts] for group in groups]
    tokens = sum(len(group.prompt.token_ids) * len(group.rollouts) for group in groups) + sum(map(sum, lengths))
    return Lot(lengths, tokens, worker_s, *(after - before for before, after in pairwise(laps))), state


def fit(lots: Sequence[Lot], pushes: Sequence[Push]) -> Costs:
    ones = Costs(decode_step_s=1.0), Costs(decode_token_s=1.0)
    rows = []
    for lot in lots:
        starts = range(0, len(lot.lengths), PROMPTS_PER_REQUEST)
        parcels = [lot.lengths[start : start + PROMPTS_PER_REQUEST] for start in starts]
        steps, tokens = (sum(sum(seconds_by_group(parcel, one)) for parcel in parcels) for one in ones)
        rows.append([1, len(parcels), steps, tokens, sum(map(len, lot.lengths)), lot.tokens])
    table = np.array(rows, dtype=float)
    parcel_s, decode_step_s, decode_token_s = _solve(table[:, [1, 2, 3]], [lot.worker_s for lot in lots])
    send_s, receive_rollout_s = _solve(table[:, [1, 4]], [lot.driver_s for lot in lots])
    [pack_token_s] = _solve(table[:, [5]], [lot.pack_s for lot in lots])
    train_step_s, train_token_s = _solve(table[:, [0, 5]], [lot.train_s for lot in lots])
    report_step_s, report_rollout_s = _solve(table[:, [0, 4]], [lot.report_s for lot in lots])
    worker_s, driver_s, ask_s = (median(getattr(push, name) for push in pushes) for name in PUSH)
    return Costs(
        parcel_s=parcel_s,
        decode_step_s=decode_step_s,
        decode_token_s=decode_token_s,
        send_s=send_s,
        receive_rollout_s=receive_rollout_s,
        pack_token_s=pack_token_s,
        train_step_s=train_step_s,
        train_token_s=train_token_s,
        report_step_s=report_step_s,
        report_rollout_s=report_rollout_s,
        publish_s=max(0.0, driver_s - 2 * ask_s),
        push_worker_s=2 * ask_s,  # the weights, then the probe
        sync_wait_s=max(0.0, min(push.wall_s - push.worker_s - push.driver_s for push in pushes)),
        load_s=worker_s,
        trainer_in_driver=True,
    )


def _solve(table: np.ndarray, seconds: Sequence[float]) -> list[float]:
    """Least squares of the relative errors; a cost is not negative."""
    scale = 1 / np.array(seconds)
    columns = list(range(table.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(table[:, columns] * scale[:, None], np.ones(len(scale)), rcond=None)
        if (found >= 0).all():
            by_column = dict(zip(columns, found.tolist(), strict=True))
            return [by_column.get(column, 0.0) for column in range(table.shape[1])]
        columns = [column for column, value in zip(columns, found, strict=True) if value >= 0]
