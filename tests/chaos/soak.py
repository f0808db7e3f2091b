"""`make soak`: half an hour of faults. Prints its seed and a line a round; ends with 1 if anything was wrong.

python -m tests.chaos.soak [--minutes 30] [--kills 500] [--seeds 20] [--async-steps 1000] [--seed N]

1. G1: kills over many seeds, every run equal to the unbroken one, at least a tenth of the kills inside a save.
2. G19: five runs that learn, broken by kills, signals and engine errors, reach what they reach without faults: exactly.
3. G3: 1,000 steps of the async loop whose workers and which itself are killed, once with weights that change in flight
   and once without: every rollout is trained once.
4. G18: for the rest of the time, and for --flat-steps at least, one process trains on with an engine that fails now and
   then; its memory and its open files must not grow.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.chaos.harness import ChaosJobs, events, tiny_tables, wait_until, write_tables
from tests.chaos.test_async import crash_and_account
from tests.chaos.test_kills import SHARE_IN_SAVE, kill_again_and_again

MAX_SLOPE_MB = 1.0
"""Growth of the resident memory in 1,000 steps."""
WARM_SHARE = 0.3
"""Of the steps, before memory is looked at: caches fill."""


def main() -> int:
    parser = argparse.ArgumentParser(description="faults for a long time")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--learning-seeds", type=int, default=5)
    parser.add_argument("--async-steps", type=int, default=1000)
    parser.add_argument("--flat-steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    given = parser.parse_args()
    deadline = time.monotonic() + 60 * given.minutes
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="podium-soak-") as scratch:
        server = ChaosJobs(Path(scratch))
        count = kill_again_and_again(server, Path(scratch), given.kills, given.seeds, given.seed)
        print(f"kills: {count}", flush=True)
        is_good = count["in_save"] >= SHARE_IN_SAVE * count["kills"]
        for number in range(given.learning_seeds):
            is_good &= learns_alike(server, Path(scratch), number, random.Random(given.seed + number))
        for in_flight in (False, True):
            folder = Path(scratch) / f"async-{in_flight}"
            assault = crash_and_account(server, folder, given.async_steps, in_flight, given.seed, kills=4)
            print(f"async, in flight {in_flight}: {assault.crashes}, {assault.redispatched} sent again", flush=True)
        is_good &= stays_flat(server, Path(scratch), deadline, given.flat_steps)
    print("good" if is_good else "NOT GOOD", flush=True)
    return 0 if is_good else 1


def learns_alike(server: ChaosJobs, scratch: Path, seed: int, rng: random.Random) -> bool:
    """The same reward with faults as without."""
    reached = {}
    for kind in ("clean", "under fire"):
        folder = scratch / f"learning-{seed}-{kind.replace(' ', '-')}"
        settings = write_tables(learning_tables(folder, seed, "FlakyEngine" if kind == "under fire" else None))
        arguments, faults = ["train", settings], 0
        while True:
            finish = server.start({"arguments": arguments})
            if kind == "under fire" and faults < 4:
                faults += 1
                wait_for_steps(folder, rng.randint(2, 8) + len(events(folder, "trained")))
                os.kill(server.pid, rng.choice([signal.SIGKILL, signal.SIGTERM]))
            if finish() == 0:
                break
            arguments = ["resume", str(folder)]
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        reached[kind] = fmean(line["reward/mean"] for line in lines[-8:])
        first = fmean(line["reward/mean"] for line in lines[:8])
    print(f"learning, seed {seed}: {reached}, from {first:.3f}, {faults} faults", flush=True)
    return reached["clean"] == reached["under fire"]


def wait_for_steps(folder: Path, steps: int) -> None:
    wait_until(lambda: len(events(folder, "trained")) >= steps or events(folder, "finished"))


def learning_tables(folder: Path, seed: int, engine: str | None) -> dict[str, Any]:
    tables = tiny_tables(folder, seed=seed, steps=40, prompts_per_step=8, rollouts_per_prompt=4)
    tables["data"] = [{"name": "arithmetic", "max_rows": 400}]
    tables["trainer"] = {"lr": 2e-3}
    return tables | ({"engine": {"name": f"tests.chaos.parts:{engine}"}} if engine else {})


def stays_flat(server: ChaosJobs, scratch: Path, deadline: float, min_steps: int) -> bool:
    """Memory and open files of one process over many steps with faults."""
    tables = tiny_tables(scratch / "flat", steps=10**6) | {
        "data": [{"name": "arithmetic", "max_rows": 2000}],
        "trainer": {"lr": 1e-7},  # so that it never has nothing left to learn
        "engine": {"name": "tests.chaos.parts:OftenFailingEngine"},
        "checkpoint": {"every": 5, "keep": 2},
    }
    finish = server.start({"arguments": ["train", write_tables(tables)]})
    wait_until(lambda: events(scratch / "flat", "started"))
    looks = []
    while time.monotonic() < deadline or len(looks) < 20 or looks[-1][0] < min_steps:
        time.sleep(0.5)
        status = json.loads((scratch / "flat" / "status.json").read_text())
        assert status["state"] == "running", server.log
        looks.append((status["step"], resident_mb(server.pid), len(os.listdir(f"/proc/{server.pid}/fd"))))
    os.kill(server.pid, signal.SIGTERM)
    assert finish() == 143, server.log
    warm = [look for look in looks if look[0] >= WARM_SHARE * looks[-1][0]]
    slope = 1000 * slope_of([(step, memory) for step, memory, _ in warm])
    files = {count for _, _, count in warm}
    faults = len(events(scratch / "flat", "dropped_group"))
    steps = warm[-1][0] - warm[0][0]
    print(f"flat: {looks[-1][0]} steps, {slope:.2f} MB in 1,000 steps, open files {files}, {faults} groups dropped")
    if steps < 1000:
        print("too few steps to speak of a slope; it is only told", flush=True)
    return (slope < MAX_SLOPE_MB or steps < 1000) and max(files) - min(files) <= 4 and faults > 0


def slope_of(points: list[tuple[float, float]]) -> float:
    """Least squares."""
    x, y = fmean(p[0] for p in points), fmean(p[1] for p in points)
    return sum((a - x) * (b - y) for a, b in points) / max(1e-9, sum((a - x) ** 2 for a, _ in points))


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


if __name__ == "__main__":
    sys.exit(main())
