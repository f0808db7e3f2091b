"""What Ray costs and what it gains: the same run in one process, with one rollout worker on Ray and with two.

The contenders take turns, round by round, so that what else the machine does falls on all; each is a run of the command
line with one thread a process. Compare ratios within a round, not seconds. On a machine with other work to do compare
processor times only: there a run of several processes is given more of the cores than one of a single process.
`all_cpu_s` is the processor time of all processes of a run for 1,000 rollouts, `driver_cpu_s` that of the driver's
alone: what stays in one place however many machines there are.

    python benchmarks/scale_out.py --out benchmarks/results/scale_out_cpu.json
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w

ON_RAY = {"name": "ray", "reward_workers": 1}
CONTENDERS: dict[str, dict[str, Any]] = {
    "local": {"name": "local"},
    "ray, 1 worker": ON_RAY | {"rollout_workers": 1},
    "ray, 2 workers": ON_RAY | {"rollout_workers": 2},
}
STAGES = ("rollout", "pack", "train", "report", "sync", "eval", "checkpoint")
"""Their seconds add up to the wall time of a step."""
WARM_UP = 2
"""Steps that are not measured."""
ROLLOUTS_PER_PROMPT = 8
LONGEST_S = 1800.0
MARK = "PODIUM_SCALE_OUT"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=192, help="prompts a step; enough for steps of 3 s and more")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory(prefix="podium-scale-out-") as name:
        for number in range(options.rounds):
            for contender, runtime in CONTENDERS.items():
                folder = Path(name) / f"{number}-{contender.replace(' ', '-').replace(',', '')}"
                found[contender].append(measure(folder, work(options.prompts, options.steps, runtime), options.prompts))
                print(contender, {key: round(value, 3) for key, value in found[contender][-1].items()}, flush=True)
    compared = compare(found)
    show(compared)
    if options.out:
        work_done = {key: getattr(options, key) for key in ("steps", "rounds", "prompts")}
        result = {"machine": describe(), "work": work_done, "runs": found, "compared": compared}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def work(prompts: int, steps: int, runtime: dict[str, Any]) -> dict[str, Any]:
    """The embedded model at a rate that leaves it where it is, so that all steps cost alike."""
    return {
        "run": {"steps": steps, "prompts_per_step": prompts, "rollouts_per_prompt": ROLLOUTS_PER_PROMPT},
        "model": {"name": "embedded", "device": "cpu"},
        "data": [{"name": "arithmetic"}],
        "reward": [{"name": "arithmetic"}],
        "rollout": {"max_new_tokens": 24},
        "filter": {"accept": "all"},
        "trainer": {"lr": 1e-7},
        "checkpoint": {"every": 0},
        "report": [{"name": "console"}],
        "runtime": runtime,
    }


def measure(folder: Path, tables: dict[str, Any], prompts: int) -> dict[str, float]:
    """One run; the driver's processor time is read when the warm-up is over, and at the last step."""
    folder.mkdir()
    (folder / "settings.toml").write_text(tomli_w.dumps(tables))
    command = [sys.executable, "-m", "podium.cli", "train", str(folder / "settings.toml")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", MARK: str(folder)}
    steps = tables["run"]["steps"]
    process = subprocess.Popen([*command, f"--run.folder={folder / 'run'}", "--quiet"], env=environment)
    marks: dict[int, tuple[float, float]] = {}
    deadline = time.monotonic() + LONGEST_S
    while process.poll() is None and time.monotonic() < deadline:
        done = len(steps_of(folder / "run"))
        if done >= WARM_UP and done not in marks:
            marks[done] = processor_s(process.pid), sum(map(processor_s, processes_of(folder)))
        time.sleep(0.05)
    if process.wait(timeout=60) != 0:
        sys.exit(f"{folder.name} failed")
    lines = steps_of(folder / "run")[WARM_UP:]
    rollouts = prompts * ROLLOUTS_PER_PROMPT
    first, last = min(marks), max(mark for mark in marks if mark < steps)  # after the last one workers end
    driver_s, all_s = (after - before for before, after in zip(marks[first], marks[last], strict=True))
    thousands = rollouts * (last - first) / 1000
    return {
        "step_s": median(sum(line.get(f"time/{stage}_s", 0.0) for stage in STAGES) for line in lines),
        "rollouts_per_s": rollouts / median(line["time/rollout_s"] for line in lines),
        "all_cpu_s": all_s / thousands,
        "driver_cpu_s": driver_s / thousands,
    }


def steps_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in map(json.loads, lines) if "eval" not in line]


def processes_of(folder: Path) -> list[int]:
    """All that have the run's mark in their environment."""
    mark, found = f"{MARK}={folder}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def processor_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare(found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians, and the median of each round's ratio to the local run of the same round."""
    compared = {}
    for contender, runs in found.items():
        pairs = list(zip(runs, found["local"], strict=True))
        compared[contender] = {key: median(run[key] for run in runs) for key in runs[0]} | {
            "step_s_to_local": median(run["step_s"] / local["step_s"] for run, local in pairs),
            "rollouts_per_s_to_local": median(run["rollouts_per_s"] / local["rollouts_per_s"] for run, local in pairs),
            "all_cpu_s_to_local": median(run["all_cpu_s"] / local["all_cpu_s"] for run, local in pairs),
        }
    return compared


def describe() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "ray": version("ray"),
        "cores": len(os.sched_getaffinity(0)),
        "load": [round(load, 1) for load in os.getloadavg()],
    }


def show(compared: dict[str, dict[str, float]]) -> None:
    print("\n| | s a step | to local | rollouts/s | to local | CPU s for 1,000 rollouts | to local | driver's |")
    print("|---|---|---|---|---|---|---|---|")
    for contender, row in compared.items():
        print(
            f"| {contender} | {row['step_s']:.2f} | {row['step_s_to_local']:.2f} | {row['rollouts_per_s']:.0f} | "
            f"{row['rollouts_per_s_to_local']:.2f} | {row['all_cpu_s']:.2f} | {row['all_cpu_s_to_local']:.2f} | "
            f"{row['driver_cpu_s']:.2f} |"
        )


if __name__ == "__main__":
    main()
