"""How much faster the async loop is than the strict one when sampling and training cost about the same.

The engine is `podium serve` over the in-process engine, a process of its own, in both; one core and one thread a side.
The schedules take turns, round by round, so that what else the machine does falls on all. Then the demo is trained
with each schedule: what running ahead costs in what is learnt.

    python benchmarks/overlap.py --out benchmarks/results/overlap_cpu.json
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

import tomli_w
from _server import a_server

SCHEDULES: dict[str, dict[str, Any]] = {
    "strict": {"max_lag": 0},
    "async, max_lag 1": {"max_lag": 1},
    "async, max_lag 2": {"max_lag": 2},
    "async, max_lag 2, in flight": {"max_lag": 2, "in_flight": True},
}
STAGES = ("rollout", "pack", "train", "report", "sync", "eval", "checkpoint")
"""Their seconds add up to the wall time of a step."""
WARM_UP = 5
"""Steps that are not measured: the first flight, first calls."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16, help="prompts a step: more of them make training costlier")
    parser.add_argument("--seeds", type=int, default=3, help="runs of the demo with each schedule; 0: none")
    parser.add_argument(
        "--schedules", type=int, default=len(SCHEDULES), help="how many of them, from the strict one on"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    schedules = dict(list(SCHEDULES.items())[: options.schedules])
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("two cores are needed: one a side")
    with (
        tempfile.TemporaryDirectory(prefix="podium-overlap-") as name,
        a_server(Path(name), one_thread(), core=cores[0]) as server,
    ):
        folder, url = Path(name), server.url
        speed: dict[str, list[dict[str, float]]] = {schedule: [] for schedule in schedules}
        for number in range(options.rounds):
            for schedule, keys in schedules.items():
                tables = work(options.prompts, options.steps, url) | {"checkpoint": {"every": 0}}
                tables["run"] |= keys
                lines = run(folder / f"{number}-{schedule}", tables, cores[1])
                speed[schedule].append(summary([line for line in lines if "eval" not in line][WARM_UP:]))
        learnt: dict[str, list[list[float]]] = {schedule: [] for schedule in schedules}
        for seed in range(options.seeds):
            for schedule, keys in schedules.items():
                tables = demo(url, seed)
                tables["run"] |= keys
                lines = run(folder / f"demo-{seed}-{schedule}", tables, cores[1])
                learnt[schedule].append([line["eval/accuracy"] for line in lines if "eval" in line])
    work_done = {name: getattr(options, name) for name in ("steps", "rounds", "prompts", "seeds")}
    result = {"machine": describe(), "work": work_done, "speed": speed, "learnt": learnt}
    show(speed, learnt)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def work(prompts: int, steps: int, url: str) -> dict[str, Any]:
    """The embedded model at a rate that leaves it where it is, so that all steps cost alike."""
    return {
        "run": {"steps": steps, "prompts_per_step": prompts, "rollouts_per_prompt": 8},
        "model": {"name": "embedded", "device": "cpu"},
        "engine": {"name": "vllm_server", "url": url},
        "rollout": {"max_new_tokens": 24},
        "filter": {"accept": "all"},
        "trainer": {"lr": 1e-6},
        "reward": [{"name": "arithmetic"}],
        "report": [{"name": "console"}],
    }


def demo(url: str, seed: int) -> dict[str, Any]:
    """The settings of examples/arithmetic, with the engine of this benchmark."""
    tables = work(16, 40, url)
    tables["run"]["seed"] = seed
    return tables | {
        "filter": {},
        "loss": {"name": "grpo", "clip": [0.2, 0.28]},
        "trainer": {"lr": 5e-4, "warmup_steps": 5},
        "eval": {"every": 10, "data": [{"name": "arithmetic", "split": "held_out"}]},
    }


def run(folder: Path, tables: dict[str, Any], core: int) -> list[dict[str, Any]]:
    """A run in a process of its own; the lines of its metrics."""
    tables["run"]["folder"] = str(folder)
    settings = folder.with_suffix(".toml")
    settings.write_text(tomli_w.dumps(tables))
    command = [sys.executable, "-m", "podium.cli", "train", str(settings)]
    subprocess.run(command, env=one_thread(), check=True, stdout=subprocess.DEVNULL, preexec_fn=lambda: pin(core))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def pin(core: int) -> None:
    os.sched_setaffinity(0, {core})


def one_thread() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def summary(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Means over the measured steps, in seconds a step."""
    seconds = {name: fmean(line[f"time/{name}_s"] for line in lines) for name in (*STAGES, "engine", "overlapped")}
    rollouts = fmean(line["batch/drawn"] for line in lines) * 8
    step = sum(seconds[name] for name in STAGES)
    return {
        "step_s": step,
        "rollouts_per_s": rollouts / step,
        "sampling_s": seconds["engine"],
        "training_s": seconds["train"],
        "trainer_waits_s": seconds["rollout"],
        "sync_s": seconds["sync"],
        "overlap": seconds["overlapped"] / min(seconds["engine"], seconds["train"]),
        "lag_max": max(line["version/lag_max"] for line in lines),
        "stale_resampled": sum(line.get("version/stale_resampled", 0.0) for line in lines),
    }


def show(speed: dict[str, list[dict[str, float]]], learnt: dict[str, list[list[float]]]) -> None:
    print(f"{'schedule':<30} s/step  sampling  training  overlap  lag  faster (by round)  held-out accuracy at the end")
    for schedule, rounds in speed.items():
        means = {name: fmean(each[name] for each in rounds) for name in rounds[0]}
        pairs = zip(speed["strict"], rounds, strict=True)
        ratios = [strict["step_s"] / each["step_s"] for strict, each in pairs]
        ends = " ".join(f"{run[-1]:.3f}" for run in learnt[schedule])
        print(
            f"{schedule:<30} {means['step_s']:6.3f}  {means['sampling_s']:8.3f}  {means['training_s']:8.3f}  "
            f"{means['overlap']:7.2f}  {means['lag_max']:3.0f}  {median(ratios):5.2f} "
            f"({min(ratios):.2f}–{max(ratios):.2f})   {ends}"
        )


def describe() -> dict[str, Any]:
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return versions | {"cores": os.cpu_count(), "load": [round(load, 1) for load in os.getloadavg()]}


if __name__ == "__main__":
    main()
