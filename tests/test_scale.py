"""The simulator of larger machines: schedules worked by hand, and that it can play thousands of workers."""

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from _simulator.clock import Interpreter, Shared, StuckError, play  # noqa: E402
from _simulator.lengths import Constant, LogNormal, Observed  # noqa: E402
from _simulator.scenario import Costs, Outcome, Scenario  # noqa: E402
from _simulator.workers import seconds_by_group  # noqa: E402
from _simulator.world import simulate  # noqa: E402

from podium.records import Plan  # noqa: E402


def scenario(**others) -> Scenario:
    """4 prompts of 2 rollouts a step, 10 tokens each at 0.1 s a token, 2 s of training, 0.5 s of sync."""
    plan = {"steps": 6, "prompts_per_step": 4, "rollouts_per_prompt": 2} | others.pop("plan", {})
    costs = Costs(decode_step_s=0.1, train_step_s=2.0, load_s=0.5, **others.pop("costs", {}))
    return Scenario(**{"plan": Plan(**plan), "workers": 1, "costs": costs, "lengths": Constant(10)} | others)


def test_the_strict_loop_samples_trains_and_syncs_in_turn() -> None:
    # 10 tokens · 0.1 s + 2 s + 0.5 s
    found = simulate(scenario())
    assert found.step_s == pytest.approx(3.5)
    assert found.trainer_busy == pytest.approx(2 / 3.5)
    assert found.worker_busy == pytest.approx(1 / 3.5)
    assert found.sync_share == pytest.approx(0.5 / 3.5)
    assert (found.lag_max, found.stale) == (0, 0)


def test_a_window_of_several_steps_is_sampled_at_once_and_synced_once() -> None:
    # 1 s of sampling for both steps, 2 · 2 s of training, 0.5 s of sync: 5.5 s for two steps
    assert simulate(scenario(plan={"sync_every": 2, "steps": 8})).step_s == pytest.approx(2.75)


def test_the_async_loop_hides_sampling_behind_training() -> None:
    # while the trainer trains 2 s, the next step's groups are written in 1 s; what is left is training and sync
    found = simulate(scenario(plan={"max_lag": 1}))
    assert found.step_s == pytest.approx(2.5)
    assert (found.lag_mean, found.lag_max, found.stale) == (1.0, 1, 0)


def test_the_async_loop_hides_training_behind_sampling() -> None:
    # sampling takes 10 · 0.4 = 4 s, training 2 s of it; then the sync
    slow = replace(scenario().costs, decode_step_s=0.4)
    assert simulate(scenario(plan={"max_lag": 1}, costs={}, workers=1) | slow_costs(slow)).step_s == pytest.approx(4.5)


def slow_costs(costs: Costs):
    return costs


def test_twice_the_workers_halve_sampling_when_a_worker_is_full() -> None:
    # 8 rollouts, 2 at a time at a worker: 4 rounds of 1 s, then 2 rounds
    alone = simulate(scenario(concurrency=2))
    both = simulate(scenario(concurrency=2, workers=2))
    assert alone.step_s == pytest.approx(4 + 2.5)
    assert both.step_s == pytest.approx(2 + 2.5)
