from dataclasses import replace

import pytest

from podium.pack import pack
from podium.records import Queues, RunState, StepGroups, UpdateResult
from podium.report.build import group_metrics, overlap_metrics, pack_metrics, step_metrics
from tests.builders import make_episode, make_group, make_prompt, make_rollout


def test_reward_metrics_are_means_over_the_rollouts_that_have_a_reward() -> None:
    groups = [make_group((0.2, 1.2)), make_group((None, 0.4)), make_group((None, None))]
    metrics = group_metrics("reward/", groups)
    # (0.2 + 1.2 + 0.4) / 3; one of the three is correct; three of six abstained
    assert metrics == {
        "reward/mean": pytest.approx(0.6, abs=1e-12),
        "reward/correct_rate": pytest.approx(1 / 3, abs=1e-12),
        "reward/arithmetic_mean": pytest.approx(0.6, abs=1e-12),
        "reward/abstained": 3.0,
        "reward/failed": 0.0,
    }


def test_each_reward_has_a_mean_over_the_rollouts_that_it_scored() -> None:
    parts = ({"exact": 1.0, "length": None}, {"exact": 0.0, "length": 8.0})
    groups = [make_group((1.0, 4.0), reward_parts=parts), make_group((3.0,), reward_parts=({"exact": 1.0},))]
    metrics = group_metrics("eval/", groups)
    assert metrics["eval/exact_mean"] == pytest.approx(2 / 3, abs=1e-12)
    assert metrics["eval/length_mean"] == 8.0
    assert metrics["eval/mean"] == pytest.approx(8 / 3, abs=1e-12)


def test_failures_are_added_up_over_rewards_and_groups() -> None:
    failing = make_group((None, None), reward_failures={"a: KeyError: 1": 2, "b: OSError: 2": 1})
    assert group_metrics("reward/", [failing, failing])["reward/failed"] == 6.0


def test_there_is_no_correct_rate_where_no_highest_reward_is_declared() -> None:
    assert "reward/correct_rate" not in group_metrics("reward/", [make_group((1.0, 2.0), correct=(None, None))])


def result(updated: bool = True, **metrics: float) -> UpdateResult:
    return UpdateResult(updated, 12, {name.replace("__", "/"): value for name, value in metrics.items()})


def test_rollout_metrics_are_lengths_and_how_they_ended() -> None:
    rollouts = (
        make_rollout(token_ids=(5, 2)),
        make_rollout(token_ids=(5, 6, 7, 8), finish_reason="length"),
        make_rollout(token_ids=(5, 6, 2)),
        make_rollout(token_ids=(5, 6, 2), finish_reason="abort"),
    )
    # (2 + 4 + 3 + 3) / 4 tokens; two of four stopped, one was cut off
    step = StepGroups(1, (make_group((1.0,) * 4, rollouts=rollouts),))
    metrics = step_metrics(RunState(step=1), step, result(), {}, 99)
    assert (metrics["rollout/length_mean"], metrics["rollout/length_max"]) == (3.0, 4.0)
    assert (metrics["rollout/stop_rate"], metrics["rollout/truncated_share"]) == (0.5, 0.25)


def test_conversations_have_metrics_of_their_own() -> None:
    episodes = (
        make_episode("call", "call", "#### 3", counts={"tool_calls": 3.0, "tool_errors": 1.0, "tool_s": 0.5}),
        make_episode("#### 4", finish_reason="turns"),
        make_episode("1", "2", counts={"environment_s": 0.3}),
        make_episode(finish_reason="abort", failure="reset: KeyError: 1"),
    )
    step = StepGroups(1, (make_group((1.0, 0.0, 1.0, None), rollouts=episodes),))
    metrics = step_metrics(RunState(step=1), step, result(), {}, 99)
    # 3, 1, 2 and 0 turns of 3 tokens; 2, 0, 1 and 0 messages of 2 tokens
    assert (metrics["rollout/length_mean"], metrics["rollout/length_max"]) == (4.5, 9.0)
    assert {name: value for name, value in metrics.items() if name.startswith("episodes/")} == {
        "episodes/turns_mean": 1.5,
        "episodes/read_tokens_mean": 1.5,
        "episodes/tool_calls_mean": 0.75,
        "episodes/tool_error_share": pytest.approx(1 / 3),
        "episodes/tool_s_mean": 0.125,
        "episodes/environment_s_mean": pytest.approx(0.075),
        "episodes/out_of_turns_share": 0.25,
        "episodes/failed": 1.0,
    }
    single = StepGroups(1, (make_group((1.0, 0.0)),))
    assert not [name for name in step_metrics(RunState(step=1), single, result(), {}, 99) if "episodes" in name]


def test_the_numbers_of_a_step() -> None:
    old = tuple(make_rollout(policy_version_min=version) for version in (4, 6))
    kept = make_group((0.2, 1.2), advantages=(-1.0, 0.5), prompt=make_prompt(0), rollouts=old, scoring_s=0.25)
    kept = replace(kept, num_pauses=3)
    new = (make_rollout(policy_version_min=6),) * 2
    dropped = make_group((0.4, 0.4), prompt=make_prompt(1), rollouts=new, scoring_s=0.5)
    metrics = step_metrics(
        RunState(step=9, policy_version=7, retired=(2, 5, 11)),
        StepGroups(2, (kept, dropped), (kept,), num_refills=3),
        result(loss__total=-0.5, pack__batches=4.0, pack__tokens=30.0),
        {"rollout": 2.0, "train": 0.5, "sync": 0.1, "engine": 1.5, "engine_waits": 1.1, "overlapped": 0.125},
        20,
    )
    # 4 rollouts of 3 tokens in 1.5 s of the engine's, which was at work in a quarter of the training; 30 packed tokens
    # in 0.5 s; version 6 was trained, one rollout is of 4 and three are of 6; 4 batches for the 2 kept rollouts, with
    # 30 tokens in 4 · 20 places
    expected = {
        "reward/mean": 0.55,
        "reward/kept_mean": 0.7,
        "reward/correct_rate": 0.25,
        "reward/kept_correct_rate": 0.5,
        "reward/arithmetic_mean": 0.55,
        "reward/kept_arithmetic_mean": 0.7,
        "reward/kept_abstained": 0.0,
        "rollout/tokens_per_s": 8.0,
        "engine/paused": 3.0,
        "advantage/abs_mean": 0.75,
        "batch/kept_ratio": 0.5,
        "batch/drawn": 2.0,
        "batch/refills": 3.0,
        "batch/retired": 3.0,
        "loss/total": -0.5,
        "pack/ratio": 2.0,
        "pack/fill": 0.375,
        "version/policy": 7.0,
        "version/lag_max": 2.0,
        "version/lag_mean": 0.5,
        "time/overlap": 0.25,
        "time/rollout_s": 2.0,
        "time/train_s": 0.5,
        "time/sync_s": 0.1,
        "time/reward_s": 0.75,
        "perf/train_tokens_per_s": 60.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-9)


def test_the_strict_loop_has_no_queues_and_the_async_one_says_where_its_prompts_stood() -> None:
    step = StepGroups(1, (make_group(),), (make_group(),))
    strict = step_metrics(RunState(step=1, policy_version=1), step, result(), {}, 99)
    assert not any(name.startswith("queue/") for name in strict)
    queued = replace(step, queues=Queues(num_writing=5, num_scoring=3, num_waiting=2, num_stale=1))
    metrics = step_metrics(RunState(step=1, policy_version=1), queued, result(), {}, 99)
    assert {name: value for name, value in metrics.items() if name not in strict} == {
        "version/stale_resampled": 1.0,
        "queue/prompts_in_flight": 5.0,
        "queue/groups_being_scored": 3.0,
        "queue/groups_scored_waiting": 2.0,
    }


@pytest.mark.parametrize(
    ("engine", "train", "overlapped", "expected"),
    [
        (2.0, 1.0, 1.0, 1.0),  # training was hidden behind sampling altogether
        (1.0, 2.0, 0.5, 0.5),  # half of the sampling was hidden behind training
        (1.0, 1.0, 0.0, 0.0),  # strictly in turn
        (0.0, 1.0, 0.0, None),  # one side had nothing to do
    ],
)
def test_the_overlap_is_the_share_of_the_shorter_sides_work(
    engine: float, train: float, overlapped: float, expected: float | None
) -> None:
    found = overlap_metrics({"engine": engine, "train": train, "overlapped": overlapped})
    assert found.get("time/overlap") == expected


def test_a_step_that_made_no_update_lags_behind_the_version_that_stays() -> None:
    group = make_group((0.2, 0.2), rollouts=(make_rollout(policy_version_min=5),) * 2)
    metrics = step_metrics(RunState(step=2, policy_version=5), StepGroups(1, (group,)), result(updated=False), {}, 99)
    assert metrics["version/lag_max"] == 0.0
    assert metrics["batch/kept_ratio"] == 0.0
    assert metrics["reward/kept_mean"] == 0.0
    assert metrics["advantage/abs_mean"] == 0.0


def test_numbers_that_are_not_finite_are_left_out() -> None:
    odd = result(updated=False, optim__grad_norm=float("nan"), loss__total=float("inf"), optim__skipped=1.0)
    metrics = step_metrics(RunState(step=1), StepGroups(1, (make_group(),), (make_group(),)), odd, {}, 99)
    assert "optim/grad_norm" not in metrics
    assert "loss/total" not in metrics
    assert metrics["optim/skipped"] == 1.0


@pytest.mark.parametrize(
    ("prompts_per_step", "drawn", "kept", "expected"),
    [
        (4, 4, 3, 0.75),  # not refilled
        (4, 2, 1, 0.5),  # the data ended: two prompts were all that was left
        (4, 7, 4, 1.0),  # refilled until full
        (4, 44, 3, 0.75),  # refilled as often as allowed
    ],
)
def test_the_kept_ratio_says_how_full_a_step_is(prompts_per_step: int, drawn: int, kept: int, expected: float) -> None:
    step = StepGroups(prompts_per_step, (make_group(),) * drawn, (make_group(),) * kept)
    assert step_metrics(RunState(step=1), step, result(), {}, 99)["batch/kept_ratio"] == expected


def test_only_rollouts_that_were_packed_count_in_the_packs_ratio() -> None:
    masked = make_rollout(loss_mask=(0, 0, 0))
    group = make_group((0.2, 1.2, 0.4, None), rollouts=(make_rollout(), make_rollout(), masked, make_rollout()))
    # one batch; of four rollouts one has no loss token and one no reward: two documents of 6 tokens
    assert pack_metrics([group], {"pack/batches": 1.0, "pack/tokens": 12.0}, 48) == {
        "pack/ratio": 0.5,
        "pack/fill": 0.25,
    }
    [batch] = pack([group], max_tokens_per_batch=48, temperature=1.0)
    assert (batch.num_documents, len(batch.token_ids)) == (2, 12)


def test_a_step_that_packed_nothing_has_no_numbers_of_packing() -> None:
    assert pack_metrics([], {"optim/skipped": 1.0}, 48) == {}
