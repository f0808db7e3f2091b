"""What `import podium` offers."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tomli_w

import podium
from podium.cli import main
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
    summaries: list[podium.run.start.Summary] = []
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


def test_an_adapter_folder_is_evaluated_over_its_base_and_is_no_model(tmp_path: Path, capsys) -> None:
    tables = eval_tables(tmp_path / "run")
    summary = podium.train(podium.Settings.from_dict(tables))
    (tmp_path / "run.toml").write_text(tomli_w.dumps(tables))
    capsys.readouterr()
    assert main(["eval", summary.model, str(tmp_path / "run.toml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["eval/accuracy"] == summary.accuracy_after
    tables["model"]["name"] = summary.model
    with pytest.raises(InputError, match="is a LoRA adapter, not a model"):
        podium.evaluate(podium.Settings.from_dict(tables))


def test_a_run_goes_on_when_nobody_reads_its_output_any_more(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        tomli_w.dumps(small_tables(tmp_path / "run") | {"report": [{"name": "console"}]})
    )
    command = f"{sys.executable} -m podium.cli train {tmp_path / 'run.toml'} | head -1"
    subprocess.run(command, shell=True, check=True, capture_output=True, timeout=120)
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "finished"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, "PASSIVE 2000"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None"),
        ({"GOMP_SPINCOUNT": "7"}, "None 7"),
    ],
)
def test_how_threads_wait_is_set_before_torch_unless_the_user_has_said_it(given: dict[str, str], wanted: str) -> None:
    code = (
        "import os, sys, podium; assert 'torch' not in sys.modules; "
        "print(os.environ.get('OMP_WAIT_POLICY'), os.environ.get('GOMP_SPINCOUNT'))"
    )
    others = {name: text for name, text in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    told = subprocess.run([sys.executable, "-c", code], env=others | given, capture_output=True, text=True, timeout=60)
    assert told.stdout.strip() == wanted, told.stderr
