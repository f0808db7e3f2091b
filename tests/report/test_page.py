import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from podium.report import page as page_module
from podium.report.page import Page, render
from podium.run.folder import Ledger, RunFolder
from podium.run.start import resume
from podium.settings.tables import Settings
from tests.builders import make_group, make_prompt, make_rollout, make_step_report
from tests.commands import podium
from tests.conftest import small_tables
from tests.report.runs import add_step, make_run

ROOT = Path(__file__).parent.parent.parent
CARD = {"title": "sums: grpo on embedded", "folder": "runs/one", "steps": 3, "facts": {"model": "embedded", "lr": 1e-5}}


def data_of(folder: Path) -> dict[str, Any]:
    """The JSON object that the page draws from."""
    page = (folder / "report.html").read_text(encoding="utf-8")
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def make_page(path: Path, every_s: float = 0.0) -> tuple[Page, Ledger]:
    """A page at its start, and the run's own record that it is made from."""
    page = Page(RunFolder(path), every_s=every_s)
    page.start(CARD, [])
    return page, Ledger(RunFolder(path))


def test_a_page_is_there_from_the_start(tmp_path: Path) -> None:
    make_page(tmp_path)
    shown = data_of(tmp_path)
    assert (shown["status"], shown["series"]["steps"], shown["rollouts"]) == ({"state": "running", "step": 0}, [], [])


def test_the_page_shows_steps_evaluations_and_rollouts(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=2, texts=["first", "second"])
    Page(folder).start(CARD, [])
    shown = data_of(folder.path)
    assert shown["series"]["steps"] == [1, 2]
    assert shown["series"]["columns"]["time/train_s"] == {"mean": [0.25, 0.25]}
    assert [line["eval/accuracy"] for line in shown["evals"]] == [0.25, 0.75]
    assert [(each["step"], each["text"], each["reward"]) for each in shown["rollouts"]] == [
        (1, "first", 1.2),
        (1, "second", 0.5),
        (2, "first", 1.2),
        (2, "second", 0.5),
    ]
    assert shown["card"]["title"] == "run: grpo on embedded"
    assert shown["pieces"] == {"8": "<8>", "24": "<24>", "25": "<25>", "2": "<2>"}


def test_a_resumed_run_shows_the_steps_that_it_had_done(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    page = Page(folder, every_s=0.0)
    page.start(CARD, [])
    add_step(Ledger(folder), 3, ["third"])
    page.write(make_step_report(step=3))
    shown = data_of(folder.path)
    assert shown["series"]["steps"] == [1, 2, 3]
    assert {each["step"] for each in shown["rollouts"]} == {1, 2, 3}


def test_a_page_is_not_written_more_often_than_asked(tmp_path: Path) -> None:
    page, record = make_page(tmp_path, every_s=3600.0)
    record.write(make_step_report(step=1))
    page.write(make_step_report(step=1))
    assert data_of(tmp_path)["series"]["steps"] == []
    page.finish({"state": "finished"})
    assert data_of(tmp_path)["series"]["steps"] == [1]


def test_a_page_that_takes_long_is_written_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A write takes 1 s of the clock below; at most 0.5 % of the time is the page's, so the next may come 200 s later.
    clock = iter([0.0, 1.0, 200.9, 201.0, 201.0, 202.0])
    monkeypatch.setattr(page_module.time, "monotonic", lambda: next(clock))
    page, record = make_page(tmp_path, every_s=2.0)  # at 0, done at 1
    record.write(make_step_report(step=1))
    page.write(make_step_report(step=1))  # at 200.9
    assert data_of(tmp_path)["series"]["steps"] == []
    page.write(make_step_report(step=1))  # at 201
    assert data_of(tmp_path)["series"]["steps"] == [1]


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_the_end_of_a_run_is_on_the_page(tmp_path: Path, state: str) -> None:
    page, _ = make_page(tmp_path)
    RunFolder(tmp_path).write_status(state, 3, 3, "because")
    page.finish({"state": state})
    assert data_of(tmp_path)["status"]["state"] == state
    assert data_of(tmp_path)["status"]["message"] == "because"


def test_a_run_that_broke_before_it_started_leaves_no_page(tmp_path: Path) -> None:
    Page(RunFolder(tmp_path)).fail()
    assert list(tmp_path.iterdir()) == []


def test_nothing_unfinished_lies_beside_the_page(tmp_path: Path) -> None:
    make_page(tmp_path)[0].finish({"state": "finished"})
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


HOSTILE = [
    "</script><script>document.title='hacked'</script>",
    "<img src=x onerror=\"document.title='hacked'\">",
    "<!--<script>",
    "{{DATA}} {{SCRIPT}} ]]> &lt;b&gt; \u2028 \x00 \ud800",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_can_leave_the_json_object(tmp_path: Path, text: str) -> None:
    page, record = make_page(tmp_path)
    group = make_group((1.0,), prompt=make_prompt(text=text, answer=text), rollouts=(make_rollout(text),))
    record.write(make_step_report(group))
    page.write(make_step_report(group))
    assert data_of(tmp_path)["rollouts"][0]["text"] == text
    written = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert written.count("<script") == 2
    assert written.count("</script") == 2


def test_the_page_needs_no_network_and_may_load_nothing() -> None:
    page = render({})
    links = set(re.findall(r"https?://[^\"'\s)%]+", page))
    assert links <= {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"<link(?![^>]*data:)|<script[^>]+src=|@import|XMLHttpRequest|innerHTML|\beval\(", page)
    assert "default-src 'none'" in page


def test_every_placeholder_is_filled() -> None:
    assert "{{" not in render({"text": "nothing"})


def test_after_a_kill_and_a_resume_the_history_is_whole(tmp_path: Path) -> None:
    tables = small_tables(tmp_path / "run", steps=6) | {"report": [{"name": "page"}]}
    tables["reward"] = [{"name": "tests.killing:mortal"}]
    (tmp_path / "settings.toml").write_text(Settings.from_dict(tables).to_toml())
    # 16 calls a step: the process is killed in the sixth. The commit of the fourth had to wait for that of the second.
    environment = os.environ | {"KILL_AT_REWARD_CALL": "92"}
    killed = podium(
        "train",
        str(tmp_path / "settings.toml"),
        "--quiet",
        environment=environment,
        constants={"podium.report.page:EVERY_S": 0.0},
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = data_of(tmp_path / "run")
    assert before["series"]["steps"] == [1, 2, 3, 4, 5]
    assert before["card"]["title"] == "run: grpo on embedded"
    resume(Settings.from_dict(tables), RunFolder(tmp_path / "run"))
    after = data_of(tmp_path / "run")
    assert after["status"]["state"] == "finished"
    assert after["card"]["title"] == "run: grpo on embedded"
    assert (after["status"]["step"], after["card"]["steps"]) == (6, 6)
    assert after["series"]["steps"] == [1, 2, 3, 4, 5, 6]
    assert {rollout["step"] for rollout in after["rollouts"]} == {1, 2, 3, 4, 5, 6}
    same = [column["mean"][:3] for name, column in before["series"]["columns"].items() if name.startswith("reward/")]
    assert same == [
        after["series"]["columns"][n]["mean"][:3] for n in before["series"]["columns"] if n.startswith("reward/")
    ]
    assert [event["event"] for event in after["events"]] == ["started", "stale_lock", "restored", "started", "finished"]
