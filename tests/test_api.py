"""What `import podium` offers."""

import threading
from pathlib import Path

import pytest

import podium
from podium.errors import InputError
from tests.conftest import small_tables


def eval_tables(folder: Path) -> dict:
    tables = small_tables(folder, steps=1)
    tables["eval"] = {"data": [{"name": "arithmetic", "split": "held_out", "max_rows": 8}]}
    return tables


def test_train_and_evaluate_are_functions_before_and_after_use(tmp_path: Path) -> None:
    settings = podium.Settings.from_dict(eval_tables(tmp_path / "run"))
    first = podium.evaluate(settings)
    summary = podium.train(settings)
    assert summary.state == "finished"
    assert summary.accuracy_before == first["eval/accuracy"]
    assert podium.evaluate(settings, Path(summary.model))["eval/accuracy"] == summary.accuracy_after


def test_settings_made_by_hand_are_resolved(tmp_path: Path) -> None:
    assert podium.train(podium.Settings(**small_tables(tmp_path / "run", steps=1))).step == 1


def test_a_run_may_live_in_a_thread(tmp_path: Path) -> None:
    """Signals are the main thread's business there."""
    summaries: list[podium.run.Summary] = []
    settings = podium.Settings.from_dict(small_tables(tmp_path / "run", steps=1))
    thread = threading.Thread(target=lambda: summaries.append(podium.train(settings)))
    thread.start()
    thread.join(timeout=120)
    assert [summary.state for summary in summaries] == ["finished"]


def test_there_is_nothing_else() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trainn'"):
        podium.trainn  # noqa: B018


def test_evaluation_needs_data(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to evaluate on"):
        podium.evaluate(podium.Settings.from_dict(small_tables(tmp_path / "run")))
