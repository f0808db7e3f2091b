"""How far one driver reaches: the loops simulated with more workers and ranks than there are machines here.

    python benchmarks/scale.py                          # from the stored fit and the figures of one H200
    python benchmarks/scale.py --measure --out benchmarks/results/scale.json   # measures here first; ten minutes

`--measure` takes the parts of a run one by one, with one worker, predicts whole runs with one and two workers from them
and compares with such runs. The extrapolation uses what results/*.json say of an H200 and what a rollout costs the
driver here; docs/scale.md explains the model and says what is assumed.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from _simulator.lengths import Constant, Lengths, LogNormal, Observed, lengths_of_run
from _simulator.scenario import Costs, Outcome, Scenario
from _simulator.world import simulate

from podium.records import Plan

RESULTS = Path(__file__).parent / "results"
CHECKS = {
    "1 worker, strict": (16, 1, 0),
    "1 worker, max_lag 1": (16, 1, 1),
    "2 workers, strict": (16, 2, 0),
    "2 workers, strict, 24 prompts": (24, 2, 0),
    "2 workers, max_lag 1": (16, 2, 1),
}
"""Prompts a step, workers and lag of the runs that are predicted and measured."""
TOLERANCE = 0.15
"""Of a prediction."""
MOST_OTHERS, HALVINGS = 32.0, 8
SIZES = (1, 4, 16, 64, 256, 1024)
GROUPS_PER_WORKER = 8
"""Of a step, 8 rollouts each: as many as a worker writes at a time."""
DRIVER = ("send_s", "route_s", "receive_rollout_s", "receive_token_s", "pack_token_s", "order_token_s")
DRIVER += ("report_step_s", "report_rollout_s", "report_token_s")
SYNC = ("publish_s", "push_worker_s", "sync_wait_s", "load_s", "weight_bytes")
TRAINING = ("train_step_s", "train_token_s")
"""Costs of each, for what would be without them."""
ADAPTER_SHARE = 0.01
"""Of the parameters, r 16 on all linear layers."""
H200_BYTES_PER_S = 4.8e12
KV_BYTES = 28 * 2 * 8 * 128 * 2
"""Keys and values of a token: layers, two, heads, their size, bfloat16."""
MEAN_CONTEXT = 700
HASHED_BYTES_PER_S = 256e6 / 0.2
"""Read and hashed by one process; benchmarks/README.md, what a resume takes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--measure", action="store_true", help="measure here, fit, and check against whole runs")
    parser.add_argument("--steps", type=int, default=25, help="of a measured run")
    parser.add_argument("--rounds", type=int, default=3, help="times that each run is measured")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="rollout workers, and trainer ranks")
    parser.add_argument("--lengths", type=Path, help="a run's folder, for answers as long as its")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    stored = measured(options.steps, options.rounds) if options.measure else stored_results()
    errors = show_check(stored["check"])
    lengths = lengths_of_run(options.lengths) if options.lengths else LogNormal(median=600, sigma=0.9, most=4096)
    if options.sizes:
        costs = h200(stored)
        stored |= {"scale_costs": finite(asdict(costs)), "scale": sweep(costs, lengths, options.sizes)}
    if options.out:
        options.out.write_text(json.dumps(stored, indent=1) + "\n")
    if options.measure and (beyond := [label for label, error in errors.items() if abs(error) > TOLERANCE]):
        sys.exit(f"not within {TOLERANCE:.0%}: {', '.join(beyond)}; measure again while nobody else uses the machine")


def stored_results() -> dict[str, Any]:
    return json.loads((RESULTS / "scale.json").read_text())


def measured(steps: int, rounds: int) -> dict[str, Any]:
    """The fit from parts, and the check against runs, round by round so that a busy minute falls on all."""
    from _driver import measure_driver
    from _measure import fit, measure_parts, measure_run

    with tempfile.TemporaryDirectory(prefix="podium-scale-") as name:
        folder = Path(name)
        driver = measure_driver(folder / "driver")
        costs = fit(*measure_parts(folder / "parts", repeats=4 * rounds))
        check: dict[str, list[dict[str, float]]] = {label: [] for label in CHECKS}
        for number in range(rounds):
            for label, (prompts, workers, max_lag) in CHECKS.items():
                run, lengths = measure_run(
                    folder / f"{number}-{workers}-{max_lag}-{prompts}", prompts, workers, max_lag, steps
                )
                plan = Plan(steps, prompts, rollouts_per_prompt=8, max_lag=max_lag)
                others = others_of(here(plan, workers, costs, lengths, 0.0), run.stretch)
                predicted = simulate(here(plan, workers, costs, lengths, others))
                check[label].append(
                    {
                        "measured_s": run.step_s,
                        "predicted_s": predicted.step_s,
                        "canary_stretch": round(run.stretch, 2),
                        "others": round(others, 2),
                    }
                )
                print(f"{label}: {run.step_s:.3f} s a step, predicted {predicted.step_s:.3f}", flush=True)
    return {
        "command": f"python benchmarks/scale.py --measure --steps {steps} --rounds {rounds}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "versions": {"python": platform.python_version(), "torch": _torch_version()},
        "fit": {name: value for name, value in asdict(costs).items() if value != getattr(Costs(), name)},
        "driver": driver,
        "check": check,
    }


def here(plan: Plan, workers: int, costs: Costs, lengths: Observed, others: float) -> Scenario:
    """This machine: driver and workers share its cores with whoever else is on it."""
    return Scenario(
        plan,
        workers,
        costs,
        lengths,
        prompts_per_request=4,
        in_order=True,
        prompt_tokens=18,
        cores=os.cpu_count(),
        others=others,
        canary=True,
        warm_up=5,
    )


def others_of(scenario: Scenario, stretch: float) -> float:
    """How many sessions of others make the canary as slow as it was, by halving."""
    scenario = replace(scenario, plan=replace(scenario.plan, steps=10))
    low, high = 0.0, MOST_OTHERS
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        is_slower = simulate(replace(scenario, others=middle)).canary_stretch > stretch
        low, high = (low, middle) if is_slower else (middle, high)
    return low


def h200(stored: Mapping[str, Any]) -> Costs:
    """Qwen3-1.7B with LoRA on H200s. Training is measured; decoding is bound by memory, and twice the bound is assumed;
    what requests and rollouts cost the driver is measured, on the machine of the fit."""
    steps = json.loads((RESULTS / "train_step_h200.json").read_text())["rows"]
    step = next(row for row in steps if row["shape"] == "qwen3-1.7b" and not row["trl"])
    return Costs(
        decode_step_s=2 * 2 * step["parameters"] / H200_BYTES_PER_S,
        decode_token_s=2 * KV_BYTES * MEAN_CONTEXT / H200_BYTES_PER_S,
        train_token_s=step["seconds_median"] / step["tokens"],
        push_worker_s=stored["fit"]["push_worker_s"],
        send_s=stored["fit"]["send_s"],
        report_step_s=stored["fit"]["report_step_s"],
        driver_bytes_per_s=3e9,
        storage_bytes_per_s=20e9,
        link_bytes_per_s=25e9,
        **weights(4.0 * ADAPTER_SHARE * step["parameters"]),
        **stored["driver"],
    )


def weights(size: float) -> dict[str, float]:
    """Written, hashed and read back by the driver's side; read and hashed by every worker."""
    return {"weight_bytes": size, "publish_s": 2 * size / HASHED_BYTES_PER_S, "load_s": size / HASHED_BYTES_PER_S}


def at(costs: Costs, lengths: Lengths, size: int) -> Scenario:
    """As many ranks as workers, and work that grows with them."""
    plan = Plan(steps=5, prompts_per_step=size * GROUPS_PER_WORKER, rollouts_per_prompt=8, max_lag=1)
    return Scenario(plan, size, costs, lengths, ranks=size, prompt_tokens=128)


def with_full_weights(scenario: Scenario) -> Scenario:
    costs = scenario.costs
    return replace(scenario, costs=replace(costs, **weights(costs.weight_bytes / ADAPTER_SHARE)))


def with_quick_driver(scenario: Scenario) -> Scenario:
    """Kept connections, ids and logprobs as bytes, four processes that receive, and a heap of workers."""
    costs = scenario.costs
    quicker = {"send_s": costs.send_s / 4, "route_s": 0.0, "receive_rollout_s": costs.receive_rollout_s / 4}
    quicker |= {"receive_token_s": costs.receive_token_s / 16, "report_token_s": costs.report_token_s / 4}
    return replace(scenario, costs=replace(costs, **quicker, token_bytes=8.0))


def with_tree(scenario: Scenario) -> Scenario:
    return replace(scenario, fan_out="tree")


def with_broadcast(scenario: Scenario) -> Scenario:
    """From GPU to GPU, over a tree: no folder, nothing to hash."""
    return replace(scenario, fan_out="tree", costs=replace(scenario.costs, publish_s=0.0, load_s=0.0))


def in_flight(scenario: Scenario) -> Scenario:
    """As many prompts under way as before, in smaller steps: a long answer may take four of them."""
    plan = scenario.plan
    smaller = max(1, plan.prompts_ahead // 5)
    steps = plan.steps * plan.prompts_per_step // smaller
    return replace(scenario, plan=replace(plan, in_flight=True, max_lag=4, prompts_per_step=smaller, steps=steps))


LADDER: dict[str, Sequence[Callable[[Scenario], Scenario]]] = {
    "LoRA, as it is": (),
    "+ a quicker driver": (with_quick_driver,),
    "+ in flight, max_lag 4": (with_quick_driver, in_flight),
    "+ weights by a tree": (with_quick_driver, in_flight, with_tree),
    "full weights, as it is": (with_full_weights,),
    "full weights, all remedies": (with_full_weights, with_quick_driver, in_flight, with_broadcast),
}


def without(scenario: Scenario) -> dict[str, Scenario]:
    """What one thing costs is what is gained without it."""
    mean = round(fmean(length for ordinal in range(1000) for length in scenario.lengths.of(ordinal, 8)))
    free = {"driver": DRIVER, "sync": SYNC, "training": TRAINING}
    costs = {name: replace(scenario.costs, **dict.fromkeys(keys, 0.0)) for name, keys in free.items()}
    cases = {name: replace(scenario, costs=changed) for name, changed in costs.items()}
    return cases | {"tails": replace(scenario, lengths=Constant(mean))}


def sweep(costs: Costs, lengths: Lengths, sizes: Sequence[int]) -> list[dict[str, Any]]:
    print("\nworkers  tokens/s  of linear  slots  trainer  driver  sync  MB/s  lag       stale  limited by")
    rows = []
    for label, changes in LADDER.items():
        print(label)
        alone = 0.0
        for size in sizes:
            scenario = at(costs, lengths, size)
            for change in changes:
                scenario = change(scenario)
            found = simulate(scenario)
            gains = {name: simulate(case).tokens_per_s / found.tokens_per_s for name, case in without(scenario).items()}
            alone = alone or found.tokens_per_s / size
            linear = found.tokens_per_s / size / alone
            rows.append({"case": label, "workers": size, "of_linear": round(linear, 3), **rounded(found)})
            rows[-1] |= {"faster_without": {name: round(gain, 2) for name, gain in gains.items()}}
            show_row(size, found, linear, gains)
    return rows


def finite(costs: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON has it: without what is infinite, and so no limit."""
    return {name: value for name, value in costs.items() if value != float("inf")}


def rounded(found: Outcome) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in asdict(found).items()}


def show_row(size: int, found: Outcome, linear: float, gains: Mapping[str, float]) -> None:
    worst = max(gains, key=lambda name: gains[name])
    shares = (found.slots_busy, found.trainer_busy, found.driver_busy, found.sync_share)
    slots, trainer, driver, sync = (f"{share:.2f}" for share in shares)
    print(
        f"{size:7d} {found.tokens_per_s:9,.0f}  {linear:9.2f}  {slots:>5}  {trainer:>7}  {driver:>6}  {sync:>4}  "
        f"{found.driver_mb_per_s:4.0f}  {found.lag_mean:4.2f} / {found.lag_max}  {found.stale:5d}  "
        f"{worst}: {gains[worst]:.1f} times as fast without",
        flush=True,
    )


def show_check(check: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, float]:
    """The relative error of each prediction, over all rounds."""
    found = {}
    print("\nrun                              measured  predicted   error  (by round)")
    for label, rounds in check.items():
        seen, told = (fmean(each[name] for each in rounds) for name in ("measured_s", "predicted_s"))
        errors = [each["predicted_s"] / each["measured_s"] - 1 for each in rounds]
        found[label] = told / seen - 1
        spread = f"({min(errors):+.0%} … {max(errors):+.0%})"
        print(f"{label:<32} {seen:7.3f}s   {told:7.3f}s  {found[label]:+6.1%}  {spread}")
    return found


def _torch_version() -> str:
    import torch

    return torch.__version__


if __name__ == "__main__":
    main()
