"""What rewards cost: a call in a worker, a kill, a sandboxed program, and how much of it generation hides.

    python benchmarks/rewards.py [--out benchmarks/results/rewards_cpu.json]

math-verify is called directly and in a plain ProcessPoolExecutor (a call each, as it is often done); beside them the
reward `math` in one of Podium's workers (a group each). Then both pools are given answers on which a regular expression
does not end. Take the figures on a machine with nothing else to do.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from statistics import median
from typing import Any

from podium.records import Group, Prompt, Rollout, ids_digest
from podium.reward.isolation import RewardWorkers
from podium.reward.sandbox import Limits, judge_asserts, run_with_inputs
from podium.run.start import train
from podium.settings.tables import Settings

DEMO = Path(__file__).parent.parent / "examples" / "arithmetic" / "settings.toml"
THIS = f"{Path(__file__).resolve()}"
GROUP = 8
WAIT_S = 0.003
POISON = "a" * 60 + "b"
ANSWERS = [rf"So the answer is \boxed{{\frac{{{n}}}{{{n + 1}}}}}." for n in range(GROUP)]


# ---- rewards


def nothing(prompt: Prompt, rollout: Rollout) -> float:
    return 1.0


def math(prompt: Prompt, rollout: Rollout) -> float:
    return verify_text(rollout.text)


def pattern(prompt: Prompt, rollout: Rollout) -> float:
    return match_text(rollout.text)


def slow(prompt: Prompt, rollout: Rollout) -> float:
    """Waits, as a reward that asks a service does."""
    time.sleep(WAIT_S)
    from podium.reward.arithmetic import arithmetic

    return arithmetic(prompt, rollout)


def verify_text(text: str) -> float:
    from math_verify import parse, verify

    return float(verify(parse(r"\boxed{\frac{1}{2}}"), parse(text)))


def match_text(text: str) -> float:
    """Takes years on `POISON`."""
    return float(re.match(r"(a+)+$", text) is None)


# ---- calls


def make_group(texts: list[str], num_tokens: int) -> Group:
    ids = tuple(range(num_tokens))
    rollouts = tuple(
        Rollout(ids, (-0.5,) * num_tokens, (1,) * num_tokens, "stop", text, 0, 0, index, index, ids_digest(ids))
        for index, text in enumerate(texts)
    )
    return Group(Prompt(0, ids[:100], ({"role": "user", "content": "What is 1 / 2?"},), "1/2"), rollouts)


def in_worker(reward: str, texts: list[str], num_tokens: int, groups: int) -> float:
    """Seconds a call with one worker, each group sent when the one before is back; the best of five rounds."""
    workers = RewardWorkers([{"name": f"{THIS}:{reward}", "options": {}}], 1, 4096)

    async def run() -> float:
        group = make_group(texts, num_tokens)

        async def rounds(count: int) -> float:
            started = time.perf_counter()
            for _ in range(count):
                await workers.score(f"{THIS}:{reward}", "each", 10.0, group)
            return (time.perf_counter() - started) / count / len(texts)

        await rounds(3)
        return min([await rounds(groups) for _ in range(5)])

    try:
        return asyncio.run(run())
    finally:
        workers.close()


def best(function: Callable[[], Any], count: int, rounds: int = 5) -> float:
    def one() -> float:
        started = time.perf_counter()
        for _ in range(count):
            function()
        return (time.perf_counter() - started) / count

    one()
    return min(one() for _ in range(rounds))


def driver_seconds(num_tokens: int, groups: int = 500) -> float:
    """Processor time that a call takes from the run's own process."""
    name = f"{THIS}:nothing"
    workers = RewardWorkers([{"name": name, "options": {}}], 1, 4096)

    async def run() -> float:
        group = make_group(ANSWERS, num_tokens)
        await workers.score(name, "each", 10.0, group)
        started = time.process_time()
        for _ in range(groups):
            await workers.score(name, "each", 10.0, group)
        return (time.process_time() - started) / groups / GROUP

    try:
        return asyncio.run(run())
    finally:
        workers.close()


def calls() -> dict[str, float]:
    group = make_group(ANSWERS, 100)
    direct = best(lambda: [nothing(group.prompt, rollout) for rollout in group.rollouts], 1000) / GROUP
    rows = {}
    for num_tokens in (100, 1000):
        seconds = in_worker("nothing", ANSWERS, num_tokens, 200)
        rows[f"overhead of a call, {num_tokens} tokens, µs"] = (seconds - direct) * 1e6
        rows[f"of which the run's own processor time, {num_tokens} tokens, µs"] = driver_seconds(num_tokens) * 1e6
        rows[f"calls per second and core, {num_tokens} tokens"] = 1 / seconds
    return rows


def math_calls() -> dict[str, float]:
    rows = {"math-verify directly, µs a call": best(lambda: [verify_text(text) for text in ANSWERS], 5) / GROUP * 1e6}
    with ProcessPoolExecutor(1) as pool:
        seconds = best(lambda: list(pool.map(verify_text, ANSWERS)), 5) / GROUP
    rows["math-verify in ProcessPoolExecutor, µs a call"] = seconds * 1e6
    rows["math in a worker, µs a call"] = in_worker("math", ANSWERS, 100, 5) * 1e6
    return rows


# ---- poison


def poisoned_executor(size: int, limit_s: float) -> float:
    """Good answers scored within 10 s after as many poisoned ones as there are processes."""
    pool = ProcessPoolExecutor(size)
    try:
        wait([pool.submit(match_text, POISON) for _ in range(size)], timeout=limit_s)
        good = [pool.submit(match_text, ANSWERS[1]) for _ in range(10)]
        done, _ = wait(good, timeout=10)
        return float(len(done))
    finally:
        for process in list(pool._processes.values()):
            process.kill()
        pool.shutdown(wait=True, cancel_futures=True)


def poisoned_workers(size: int, limit_s: float) -> tuple[float, float]:
    """The same with Podium's, and the seconds that a kill and a new worker take beyond the limit."""
    name = f"{THIS}:pattern"
    workers = RewardWorkers([{"name": name, "options": {}}], size, 4096)

    async def run() -> tuple[float, float]:
        good = make_group([ANSWERS[1]], 10)
        poison = make_group([POISON], 10)
        await asyncio.gather(*(workers.score(name, "each", 60.0, good) for _ in range(size)))
        beyond = []
        for _ in range(5):
            started = time.perf_counter()
            await workers.score(name, "each", limit_s, poison)
            await workers.score(name, "each", 60.0, good)
            beyond.append(time.perf_counter() - started - limit_s)
        await asyncio.gather(*(workers.score(name, "each", limit_s, poison) for _ in range(size)))
        tasks = [asyncio.ensure_future(workers.score(name, "each", 10.0, good)) for _ in range(10)]
        done, _ = await asyncio.wait(tasks, timeout=10)
        return float(sum(task.result() == [1.0] for task in done)), median(beyond)

    try:
        return asyncio.run(run())
    finally:
        workers.close()


# ---- programs


def programs() -> dict[str, float]:
    """Beyond the program itself: a bare interpreter, without site, that runs the same."""
    program, limits = "print(int(input()) * 2)", Limits(5.0, 10.0, 512)
    bare = [os.path.realpath(sys.executable), "-S", "-c", program]
    itself = best(lambda: subprocess.run(bare, input=b"21", capture_output=True, check=True), 10)
    rows = {"a bare interpreter with the program, ms": itself * 1e3}
    inputs = [str(n) for n in range(10)]
    source = "def double(n): return 2 * n"
    tests = [f"assert double({n}) == {2 * n}" for n in range(10)]
    for kind in ("bubblewrap", "weak"):
        seconds = best(lambda kind=kind: run_with_inputs(program, ["21"], limits, kind), 10)
        rows[f"code_stdio, {kind}, one case, beyond the program, ms"] = (seconds - itself) * 1e3
        seconds = best(lambda kind=kind: run_with_inputs(program, inputs, limits, kind), 3)
        rows[f"code_stdio, {kind}, ten cases, ms in all"] = seconds * 1e3
        seconds = best(lambda kind=kind: judge_asserts(source, tests[:1], limits, kind), 10)
        rows[f"code, {kind}, one test, beyond the program, ms"] = (seconds - itself) * 1e3
        seconds = best(lambda kind=kind: judge_asserts(source, tests, limits, kind), 3)
        rows[f"code, {kind}, ten tests, ms in all"] = seconds * 1e3
    return rows


# ---- a run


def overlap(rounds: int = 3) -> dict[str, float]:
    """Seconds of a step until its last group is scored: generation alone, and with a reward that waits 3 ms a call.

    The two take turns; of each the best round counts.
    """
    rewards = {"generation alone": "arithmetic", "generation with a slow reward": f"{THIS}:slow"}
    seconds = [{label: rollout_seconds(reward) for label, reward in rewards.items()} for _ in range(rounds)]
    rows = {f"{label}, s a step": min(each[label] for each in seconds) for label in rewards}
    rows["the slow reward alone, over all workers, s a step"] = WAIT_S * 16 * GROUP / len(os.sched_getaffinity(0))
    return rows


def rollout_seconds(reward: str, steps: int = 12) -> float:
    """Median of a short run of the demo, 16 prompts × 8 rollouts a step, of which 32 are written at a time."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--run.steps={steps}", f"--run.folder={folder}/run", "--checkpoint.every=0"]
        flags += ["--run.prompts_per_step=16", f"--run.rollouts_per_prompt={GROUP}", "--engine.concurrency=32"]
        tables = Settings.from_toml(DEMO, flags).to_dict() | {"reward": [{"name": reward}], "report": [], "eval": {}}
        train(Settings.from_dict(tables))
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return median(json.loads(line)["time/rollout_s"] for line in lines[1:])


def main(out: Path | None) -> None:
    rows: dict[str, float] = {}
    for part in (calls, math_calls, programs, overlap):
        rows |= part()
    rows["good answers of 10 scored after poison, ProcessPoolExecutor"] = poisoned_executor(2, 1.0)
    rows["good answers of 10 scored after poison, workers"], beyond = poisoned_workers(2, 1.0)
    rows["a kill, a new worker and its first call, ms beyond the limit"] = beyond * 1e3
    for name, value in rows.items():
        print(f"{name:<65} {value:10.4g}")
    if out is not None:
        made = {"command": "python benchmarks/rewards.py", "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count()}
        out.write_text(json.dumps(made | {"rows": rows}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--out", type=Path)
    main(arguments.parse_args().out)
