"""Trackers can neither stop nor slow a run; each real one is tried where its package is installed."""

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podium.errors import InputError
from podium.report._tracker import MAX_FAILURES, Background, Tracker
from podium.run.folder import RunFolder
from podium.run.start import resume, train
from podium.settings.tables import Settings
from tests.conftest import small_tables


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_calls_are_made_in_their_order_and_all_before_it_closes() -> None:
    made: list[int] = []
    background = Background(pytest.fail)
    for number in range(100):
        background.put(lambda number=number: made.append(number))
    assert background.close()
    assert made == list(range(100))


def test_where_a_tracker_is_too_slow_the_oldest_waiting_calls_are_dropped() -> None:
    gate, made = threading.Event(), list[int]()
    background = Background(pytest.fail, max_waiting=3)
    background.put(gate.wait)
    wait_for(background._calls.empty)
    for number in range(10):
        background.put(lambda number=number: made.append(number))
    gate.set()
    assert background.close()
    assert (made, background.num_dropped) == ([7, 8, 9], 7)


def test_a_failure_is_told_once_and_the_next_calls_are_made() -> None:
    told, made = list[str](), list[int]()

    def breaks() -> None:
        raise RuntimeError("no network")

    background = Background(told.append)
    for call in (breaks, breaks, lambda: made.append(1)):
        background.put(call)
    assert background.close()
    assert (told, made, background.num_failed) == (["RuntimeError: no network"], [1], 2)


def test_a_tracker_that_only_fails_is_left_alone() -> None:
    calls: list[int] = []

    def breaks() -> None:
        calls.append(1)
        raise SystemExit("even this does not end the run")

    background = Background(lambda _: None)
    for _ in range(50):
        background.put(breaks)
    assert background.close()
    assert len(calls) == MAX_FAILURES


def test_a_call_that_hangs_is_waited_for_only_so_long() -> None:
    gate = threading.Event()
    background = Background(pytest.fail)
    background.put(gate.wait)
    wait_for(lambda: background._busy_since is not None)
    started = time.monotonic()
    assert not background.close(patience_s=0.3)
    assert time.monotonic() - started > 0.2
    assert background._busy_since is not None
    background._busy_since -= 1000
    started = time.monotonic()
    assert not background.close(patience_s=100)  # it has hung for longer than that already: no waiting at all
    assert time.monotonic() - started < 60
    gate.set()


def test_a_tracker_that_gets_on_is_waited_for_however_much_it_has_to_do() -> None:
    background = Background(pytest.fail)
    made: list[int] = []
    for _ in range(8):
        background.put(lambda: time.sleep(0.5))
    background.put(lambda: made.append(1))
    assert background.close(patience_s=3.5)  # less than all of them take, and seven times what one takes
    assert made == [1]


class Blocked(Tracker):
    """Hangs in its first call, for ever. Counts the seconds that the run spends in it."""

    package = "json"
    seconds = 0.0
    calls = 0

    def open(self, card: Any, last_step: int) -> None:
        threading.Event().wait()

    def _put(self, call: Any) -> None:
        started = time.monotonic()
        super()._put(call)
        type(self).seconds += time.monotonic() - started
        type(self).calls += 1


class Broken(Tracker):
    package = "json"

    def open(self, card: Any, last_step: int) -> None:
        raise OSError("no such server")

    def log(self, step: int, metrics: Any) -> None:
        raise OSError("still no such server")


def run_with(folder: Path, report: dict[str, Any], **run: Any) -> Any:
    tables = small_tables(folder, **run)
    tables["report"].append(report)
    return train(Settings.from_dict(tables))


def test_a_blocked_tracker_costs_a_run_less_than_a_hundredth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.report._tracker.Background.close", lambda self: False)  # its patience has its own test
    Blocked.seconds, Blocked.calls = 0.0, 0
    summary = run_with(tmp_path / "run", {"name": f"{__name__}:Blocked"})
    assert (summary.state, summary.step, Blocked.calls) == ("finished", 4, 4)
    assert Blocked.seconds < 0.01 * summary.seconds


def test_a_broken_tracker_stops_nothing_and_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with(tmp_path / "run", {"name": f"{__name__}:Broken"}, steps=2).state == "finished"
    assert capsys.readouterr().err == "report 'broken': OSError: no such server\n"
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["message"] for event in events if event["event"] == "tracker_trouble"] == ["OSError: no such server"]


def test_a_runs_id_is_its_own_and_stays(tmp_path: Path) -> None:
    def tracker(name: str) -> Blocked:
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir(exist_ok=True)
        folder.event("started")
        return Blocked(folder)

    first = tracker("one").run_id
    assert first == tracker("one").run_id  # a second "started", as after a resume
    assert first != tracker("two").run_id


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from podium.report.wandb import Wandb

    monkeypatch.setattr(Wandb, "package", "no_such_package")
    with pytest.raises(InputError, match=r"report 'wandb' needs no_such_package, .*pip install 'podium-rl\[wandb\]'"):
        run_with(tmp_path / "run", {"name": "wandb"})
    assert not (tmp_path / "run").exists()


def run_and_resume(folder: Path, report: dict[str, Any]) -> list[dict[str, Any]]:
    """Two steps, a resume, two more; the lines of its own record."""
    run_with(folder, report, steps=2)
    tables = small_tables(folder, steps=4)
    tables["report"].append(report)
    resume(Settings.from_dict(tables), RunFolder(folder))
    assert "tracker_trouble" not in (folder / "events.jsonl").read_text()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_tensorboard_has_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the run is resumed in the second in which it began: tensorboardX names its files by the second."""
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    from tensorboardX import event_file_writer
    from tensorboardX.proto.event_pb2 import Event

    monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: 1_700_000_000.5, sleep=time.sleep))
    lines = run_and_resume(tmp_path / "run", {"name": "tensorboard"})
    found: dict[int, float] = {}
    for path in sorted((tmp_path / "run" / "tensorboard").iterdir()):
        data, place = path.read_bytes(), 0
        while place < len(data):  # each record: its length (8 bytes), a checksum (4), itself, a checksum (4)
            length = int.from_bytes(data[place : place + 8], "little")
            event = Event.FromString(data[place + 12 : place + 12 + length])
            place += 16 + length
            for value in event.summary.value:
                if value.tag == "reward/mean":
                    assert event.step not in found
                    found[event.step] = value.simple_value
    assert found == pytest.approx({line["step"]: line["reward/mean"] for line in lines}, abs=1e-6)


@pytest.mark.filterwarnings("ignore")  # of the packages below
def test_mlflow_has_one_run_with_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="sqlalchemy is not installed")
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    lines = run_and_resume(tmp_path / "run", {"name": "mlflow"})
    client = MlflowClient(f"sqlite:///{tmp_path / 'run' / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("podium").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["run.prompts_per_step"] == "4"
    found = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "reward/mean")}
    assert found == pytest.approx({line["step"]: line["reward/mean"] for line in lines}, abs=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_wandb_keeps_a_run_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    run_and_resume(tmp_path / "run", {"name": "wandb", "mode": "offline"})
    folders = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1  # one id: it is one run
    for folder in folders:
        [record] = folder.glob("run-*.wandb")
        wait_for(lambda record=record: b"reward/mean" in record.read_bytes(), 120)  # a process of wandb's writes it


@pytest.mark.filterwarnings("ignore")
def test_trackio_has_one_run_with_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed")
    import sqlite3

    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    lines = run_and_resume(tmp_path / "run", {"name": "trackio"})
    assert "Trackio" not in capsys.readouterr().out  # the standard output is podium's
    with sqlite3.connect(next((tmp_path / "trackio").glob("*.db"))) as database:
        rows = database.execute("select step, run_name, metrics from metrics").fetchall()
    assert len({name for _, name, _ in rows}) == 1
    assert sorted({step for step, _, _ in rows}) == [line["step"] for line in lines]
