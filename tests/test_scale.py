"""The simulator of larger machines: schedules worked by hand, and that it can play thousands of workers."""

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import scale
from _simulator.clock import Cores, Interpreter, Shared, StuckError, play
from _simulator.lengths import Constant, LogNormal, Observed
from _simulator.scenario import Costs, Scenario
from _simulator.workers import seconds_by_group
from _simulator.world import simulate

from podium.records import Plan


def scenario(plan: dict[str, Any] | None = None, costs: dict[str, Any] | None = None, **others: Any) -> Scenario:
    """4 prompts of 2 rollouts a step, 10 tokens each at 0.1 s a token: 1 s of sampling; 2 s training, 0.5 s sync."""
    given: dict[str, Any] = {"decode_step_s": 0.1, "train_step_s": 2.0, "load_s": 0.5} | (costs or {})
    sizes: dict[str, Any] = {"steps": 6, "prompts_per_step": 4, "rollouts_per_prompt": 2} | (plan or {})
    return Scenario(**{"plan": Plan(**sizes), "workers": 1, "costs": Costs(**given), "lengths": Constant(10)} | others)


def test_the_strict_loop_samples_trains_and_syncs_in_turn() -> None:
    # 1 s + 2 s + 0.5 s
    found = simulate(scenario())
    assert found.step_s == pytest.approx(3.5)
    assert found.trainer_busy == pytest.approx(2 / 3.5)
    assert found.worker_busy == pytest.approx(1 / 3.5)
    assert found.sync_share == pytest.approx(0.5 / 3.5)
    assert found.rollouts_per_s == pytest.approx(8 / 3.5)
    assert found.tokens_per_s == pytest.approx(80 / 3.5)
    assert (found.lag_max, found.stale) == (0, 0)


def test_a_window_of_several_steps_is_sampled_at_once_and_synced_once() -> None:
    # 1 s of sampling for both steps, 2 · 2 s of training, 0.5 s of sync: 5.5 s for two steps
    found = simulate(scenario(plan={"sync_every": 2, "steps": 8}))
    assert found.step_s == pytest.approx(2.75)
    assert (found.lag_mean, found.lag_max) == (0.5, 1)


def test_the_async_loop_hides_sampling_behind_training() -> None:
    # while the trainer trains 2 s, the next step's groups are written in 1 s; what is left is training and sync
    found = simulate(scenario(plan={"max_lag": 1}))
    assert found.step_s == pytest.approx(2.5)
    assert (found.lag_mean, found.lag_max, found.stale) == (1.0, 1, 0)


def test_the_async_loop_hides_training_behind_sampling() -> None:
    # sampling takes 10 · 0.4 = 4 s, training 2 s of them; then the sync
    found = simulate(scenario(plan={"max_lag": 1}, costs={"decode_step_s": 0.4}))
    assert found.step_s == pytest.approx(4.5)
    assert found.worker_busy == pytest.approx(4 / 4.5)


def test_twice_the_workers_halve_sampling_where_they_are_full() -> None:
    # 8 rollouts, 2 at a time at a worker: 4 rounds of 1 s with one worker, 2 with two; then 2.5 s
    assert simulate(scenario(concurrency=2)).step_s == pytest.approx(4 + 2.5)
    assert simulate(scenario(concurrency=2, workers=2)).step_s == pytest.approx(2 + 2.5)


def test_twice_the_ranks_halve_training_and_add_the_exchange_of_gradients() -> None:
    # 8 rollouts of 10 tokens at 0.1 s: 8 s alone; 4 s on two ranks, and 2 · 1/2 of 3 bytes at 1 byte a second
    costs = {"train_step_s": 0.0, "train_token_s": 0.1, "weight_bytes": 3.0, "link_bytes_per_s": 1.0}
    assert simulate(scenario(costs=costs)).step_s == pytest.approx(1 + 8 + 0.5)
    assert simulate(scenario(costs=costs, ranks=2)).step_s == pytest.approx(1 + 4 + 3 + 0.5)


def test_a_driver_that_is_full_makes_more_workers_useless() -> None:
    # 4 groups of 2 rollouts at 1 s each are 8 s of the driver's interpreter, however many workers there are
    costs = {"receive_rollout_s": 1.0, "train_step_s": 0.0, "load_s": 0.0}
    for workers in (1, 2, 4):
        found = simulate(scenario(costs=costs, workers=workers))
        assert found.step_s == pytest.approx(1 + 8)
        assert found.driver_busy == pytest.approx(8 / 9)


def test_the_drivers_link_is_shared_by_answers_that_come_together() -> None:
    # 8 rollouts of 10 tokens, 2 bytes each, over 16 bytes a second: 10 s after 1 s of sampling
    found = simulate(scenario(costs={"token_bytes": 2.0, "driver_bytes_per_s": 16.0, "train_step_s": 0, "load_s": 0}))
    assert found.step_s == pytest.approx(11)
    assert found.driver_mb_per_s == pytest.approx(160 / 11 / 1e6)


def test_every_worker_reads_new_weights_from_one_storage_or_they_are_handed_on() -> None:
    # 20 workers · 6 bytes over 10 bytes a second; or 16 workers at once and then the other 4, 6 bytes over 3 each
    costs = {"weight_bytes": 6.0, "storage_bytes_per_s": 10.0, "link_bytes_per_s": 3.0, "load_s": 0.0}
    assert simulate(scenario(costs=costs, workers=20)).sync_share == pytest.approx(12 / (1 + 2 + 12))
    tree = simulate(scenario(costs=costs, workers=20, fan_out="tree"))
    assert tree.sync_share == pytest.approx(4 / (1 + 2 + 4))


def test_a_push_waits_for_the_longest_answer_unless_weights_change_in_flight() -> None:
    # One prompt a step, of 10 and of 100 tokens in turn. Each is sent after a push and has to be written before the
    # next: 1 s and 10 s in turn. In flight, the next prompt is sent at once and short ones overtake.
    given: dict[str, Any] = {"lengths": LongAndShort(), "costs": {"train_step_s": 0.1, "load_s": 0.0}, "warm_up": 10}
    plan = {"prompts_per_step": 1, "steps": 41}
    assert simulate(scenario(plan=plan | {"max_lag": 1}, **given)).step_s == pytest.approx(5.5)
    found = simulate(scenario(plan=plan | {"max_lag": 8, "in_flight": True}, **given))
    assert found.step_s < 2.75
    assert 0 < found.lag_max <= 8


def test_groups_that_were_overtaken_for_too_long_are_sampled_again() -> None:
    given: dict[str, Any] = {"lengths": LongAndShort(), "costs": {"train_step_s": 0.1, "load_s": 0.0}, "warm_up": 10}
    plan = {"prompts_per_step": 1, "steps": 40, "max_lag": 3, "in_flight": True}
    found = simulate(scenario(plan=plan, **given))
    assert found.stale > 0
    assert found.lag_max <= 3


class LongAndShort:
    """In turn."""

    def of(self, ordinal: int, rollouts: int) -> list[int]:
        return [100 if ordinal % 2 else 10] * rollouts


def test_a_batch_gets_slower_with_its_size() -> None:
    # 8 rollouts for 10 steps of 0.1 + 8 · 0.05 s
    assert simulate(scenario(costs={"decode_token_s": 0.05})).step_s == pytest.approx(10 * 0.5 + 2.5)


def test_two_processes_on_one_core_take_twice_as_long_and_on_two_as_long_as_one() -> None:
    # 4 prompts in 2 parcels, a worker each: 10 steps of 0.1 s; training is the driver's
    costs = {"trainer_in_driver": True}
    given = {"workers": 2, "prompts_per_request": 2, "in_order": True, "concurrency": 4, "costs": costs}
    assert simulate(scenario(**given, cores=2)).step_s == pytest.approx(1 + 2 + 0.5)
    assert simulate(scenario(**given, cores=1)).step_s == pytest.approx(2 + 2 + 1)
    # another session that wants a core leaves two thirds of one to each worker, and a whole one to the driver alone
    assert simulate(scenario(**given, cores=2, others=1)).step_s == pytest.approx(1.5 + 2 + 0.75)
    # three leave two fifths to each worker, and half a core to the driver
    assert simulate(scenario(**given, cores=2, others=3)).step_s == pytest.approx(2.5 + 4 + 1.25)


def test_a_parcels_batch_shrinks_when_a_quarter_of_it_is_done() -> None:
    # one step of 4 rollouts, after which 2 of 4 leave; one step of 2; group 0 is whole then, group 1 after 2 more of 1
    costs = Costs(decode_token_s=1.0)
    assert seconds_by_group([[1, 2], [1, 4]], costs) == [4 + 2, 1 + 1]
    # an answer that is ready waits for the one before it
    assert seconds_by_group([[3], [1]], costs) == [2 + 1 + 1, 0]


def test_users_of_a_shared_resource_advance_together() -> None:
    # work 1 and 3 at speed 1/2 each: the first is done at 2; the other, alone from then on, at 4
    async def times() -> list[float]:
        shared = Shared(lambda users: 1 / users)

        async def use(work: float) -> float:
            await shared.use(work)
            return asyncio.get_running_loop().time()

        found = await asyncio.gather(use(1.0), use(3.0))
        assert (shared.busy_s, shared.user_s) == pytest.approx((4.0, 6.0))
        return found

    assert play(times()) == pytest.approx([2.0, 4.0])


def test_cores_are_dealt_out_to_sessions_and_in_them_to_processes() -> None:
    # a has two processes, b one: of 2 cores b gets one and a's processes half of one each; b's 1 s is over at 1, then
    # a's have a core each: 0.5 s done, 1.5 s more
    async def times() -> list[float]:
        cores = Cores(2.0)

        async def use(session: str, work: float) -> float:
            await cores.use(session, work)
            return asyncio.get_running_loop().time()

        return await asyncio.gather(use("a", 2.0), use("a", 2.0), use("b", 1.0))

    assert play(times()) == pytest.approx([2.5, 2.5, 1.0])


def test_an_interpreter_gives_each_thread_its_slice() -> None:
    # a of 2 slices and b of 1 take turns: a, b, a
    async def times() -> list[float]:
        interpreter = Interpreter(slice_s=1.0)

        async def use(work: float) -> float:
            await interpreter.use(work)
            return asyncio.get_running_loop().time()

        return await asyncio.gather(use(2.0), use(1.0))

    assert play(times()) == pytest.approx([3.0, 2.0])


def test_a_simulation_in_which_nothing_can_happen_ends_with_an_error() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(StuckError):
        play(wait())


def test_two_simulations_are_equal() -> None:
    given = {"lengths": LogNormal(50, 1.0, 500), "workers": 3, "concurrency": 4, "plan": {"max_lag": 2, "steps": 12}}
    assert simulate(scenario(**given)) == simulate(scenario(**given))


def test_lengths_belong_to_prompts_and_have_a_tail() -> None:
    lengths = LogNormal(100, 1.0, 1000)
    drawn = sorted(length for ordinal in range(2000) for length in lengths.of(ordinal, 8))
    assert lengths.of(7, 8) == lengths.of(7, 8) != lengths.of(8, 8)
    assert drawn[len(drawn) // 2] == pytest.approx(100, rel=0.1)
    assert drawn[-1] == 1000
    assert Observed([[3, 4]]).of(5, 2) == [3, 4]


def test_two_thousand_workers_take_seconds() -> None:
    plan = {"max_lag": 1, "prompts_per_step": 2000, "rollouts_per_prompt": 8, "steps": 4}
    began = time.process_time()
    found = simulate(scenario(plan=plan, workers=2000, lengths=LogNormal(100, 1.0, 1000)))
    assert time.process_time() - began < 30
    assert found.rollouts_per_s > 0


def test_the_error_of_a_prediction_is_over_all_rounds() -> None:
    # 2.2 s predicted for 1 + 1 s measured, and 0.9 s for 1 s
    check = {
        "a": [{"measured_s": 1.0, "predicted_s": 1.0}, {"measured_s": 1.0, "predicted_s": 1.2}],
        "b": [{"measured_s": 1.0, "predicted_s": 0.9}],
    }
    assert scale.show_check(check) == pytest.approx({"a": 0.1, "b": -0.1})


def test_others_are_as_many_as_make_the_canary_as_slow() -> None:
    plan = Plan(12, 4, rollouts_per_prompt=2)
    costs = Costs(decode_step_s=0.01, train_step_s=0.1, trainer_in_driver=True)
    busy = scale.here(plan, 1, costs, Observed([[10, 10]]), 3.0)
    stretch = simulate(replace(busy, plan=replace(plan, steps=10))).canary_stretch
    assert scale.others_of(replace(busy, others=0.0), stretch) == pytest.approx(3.0, abs=0.3)


def test_a_single_worker_is_not_limited_by_the_driver_and_many_are() -> None:
    costs = scale.h200(scale.stored_results())
    lengths = LogNormal(median=60, sigma=0.9, most=400)
    few, many = (simulate(scale.at(costs, lengths, size)) for size in (1, 128))
    assert few.driver_busy < 0.5 < many.driver_busy
