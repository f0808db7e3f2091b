from typing import Any

import pytest

from podium.report.web.health import Facts, health
from podium.report.web.reader import Series


def verdicts(
    steps: int = 50, status: dict[str, Any] | None = None, events: list[dict[str, Any]] | None = None, **metrics: Any
) -> dict[str, str]:
    """Title → level, of a run whose metrics (`__` for the slash) are numbers, or functions of the step."""
    series = Series()
    for step in range(1, steps + 1):
        named = {name.replace("__", "/"): value for name, value in metrics.items()}
        series.add({"step": step} | {name: value(step) if callable(value) else value for name, value in named.items()})
    found = health(Facts(series, events or [], status or {"state": "running"}))
    return {verdict.title: verdict.level for verdict in found}


def test_nothing_is_said_of_what_is_not_there() -> None:
    assert verdicts(steps=0) == {}
    assert verdicts(steps=3) == {"All four checks hold": "good"}


@pytest.mark.parametrize(
    ("metrics", "title", "level"),
    [
        ({"reward__mean": lambda step: step / 50}, "The policy is learning", "good"),
        ({"reward__mean": lambda step: 1 - step / 50}, "The reward falls", "warn"),
        ({"reward__mean": lambda step: step % 2}, "The reward does not change", "note"),
        ({"batch__kept_ratio": 0.8}, "Groups have signal", "good"),
        ({"batch__kept_ratio": 0.1, "reward__correct_rate": 0.95}, "Too easy", "note"),
        ({"batch__kept_ratio": 0.1, "reward__correct_rate": 0.02}, "Too hard", "warn"),
        ({"batch__kept_ratio": 0.1, "reward__correct_rate": 0.5}, "Few groups have signal", "warn"),
        ({"batch__kept_ratio": 0.1}, "Few groups have signal", "warn"),
        ({"reward__failed": 1.0}, "50 reward calls failed", "warn"),
        ({"reward__failed": lambda step: float(step == 1)}, "1 reward calls failed", "note"),
        ({"reward__abstained": 2.0}, "100 rollouts have no reward", "warn"),
        ({"reward__judge_retries": 3.0}, "Work was repeated or dropped", "warn"),
        ({"rollout__truncated_share": 0.5}, "Many answers are truncated", "warn"),
        ({"policy__entropy": lambda step: 1.0 if step < 25 else 0.01}, "The policy has stopped exploring", "warn"),
        (
            {"policy__entropy": lambda step: 1.0 if step < 25 else 0.01, "reward__correct_rate": 0.99},
            "The entropy is low",
            "note",
        ),
        ({"mismatch__abs_mean": 1e-6, "mismatch__outside_share": 0.0}, "Sampler and trainer agree", "good"),
        ({"mismatch__abs_mean": 0.2, "mismatch__outside_share": 0.3}, "Sampler and trainer differ", "warn"),
        ({"mismatch__abs_mean": 0.2, "mismatch__masked_share": 0.3}, "Sampler and trainer differ", "warn"),
        ({"kl__k3": 2.0}, "Far from the reference", "warn"),
        ({"optim__grad_norm": lambda step: 30.0 if step == 48 else 1.0}, "One gradient was large", "note"),
        ({"optim__skipped": 1.0}, "Steps without an update", "warn"),
        ({"version__lag_max": 1.0}, "Staleness", "good"),
        ({"version__lag_max": 12.0}, "Staleness", "warn"),
        ({"time__rollout_s": 2.0, "time__train_s": 1.0}, "A step takes 3 s", "good"),
        ({"time__rollout_s": 1.0, "time__eval_s": 2.0}, "A step takes 3 s", "note"),
        ({"queue__buffered": 3.0}, "Queues", "good"),
        ({"time__trainer_waits_s": 0.5}, "Waits", "good"),
        ({"version__stale_resampled": 2.0}, "Work was repeated or dropped", "warn"),
    ],
)
def test_a_metric_has_its_verdict(metrics: dict[str, Any], title: str, level: str) -> None:
    assert verdicts(**metrics).get(title) == level


@pytest.mark.parametrize(
    "metrics",
    [
        {"rollout__truncated_share": 0.1},
        {"kl__k3": 0.1},
        {"optim__skipped": 0.0},
        {"optim__grad_norm": 1.0},
        {"reward__failed": 0.0},
        {"policy__entropy": 1.0},
    ],
)
def test_what_is_well_and_needs_no_word_gets_none(metrics: dict[str, Any]) -> None:
    assert verdicts(**metrics) == {"All four checks hold": "good"}


@pytest.mark.parametrize(
    ("state", "title", "level"),
    [
        ("failed", "The run broke", "bad"),
        ("killed", "The run was killed", "warn"),
        ("stopped", "The run was stopped", "note"),
    ],
)
def test_the_worst_comes_first(state: str, title: str, level: str) -> None:
    found = verdicts(status={"state": state}, batch__kept_ratio=0.9, optim__grad_norm=1.0)
    assert next(iter(found.items())) == (title, level)


@pytest.mark.parametrize(
    ("error", "title"),
    [
        ("ParityError", "engine = trainer"),
        ("SplitError", "loss without split"),
        ("RewardContractError", "rewards keep their contract"),
        ("TokenMismatchError", "ids trained = ids sampled"),
    ],
)
def test_a_check_that_failed_is_named(error: str, title: str) -> None:
    events = [{"event": "started"}, {"event": "failed", "error": error, "message": "so and so"}]
    found = verdicts(status={"state": "failed"}, events=events)
    assert found[f"Check failed: {title}"] == "bad"
    assert "All four checks hold" not in found


def test_a_check_that_failed_before_a_resume_is_no_longer_bad() -> None:
    events = [{"event": "failed", "error": "ParityError"}, {"event": "restored"}, {"event": "started"}]
    assert verdicts(events=events) == {"All four checks hold": "good", "Resumed 1×": "good"}


def test_events_of_workers_are_told() -> None:
    assert verdicts(events=[{"event": "engine_replaced"}] * 2)["Other events"] == "note"
