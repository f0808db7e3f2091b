import json
import re
from pathlib import Path
from typing import Any

import pytest

from podium.records import EvalReport
from podium.report import console as console_module
from podium.report.console import Console, duration, summary_text
from tests.builders import make_group, make_rollout, make_step_report

CARD = {"title": "arithmetic: grpo on embedded", "folder": "runs/one", "steps": 20, "facts": {}}
SUMMARY = {
    "state": "finished",
    "step": 20,
    "steps": 20,
    "seconds": 12.34,
    "message": "",
    "accuracy_before": 0.25,
    "accuracy_after": 0.5,
    "skipped_steps": 0,
    "dropped_groups": 0,
    "restarts": 0,
    "folder": "runs/one",
    "page": "runs/one/report.html",
    "model": "runs/one/final",
    "exit_code": 0,
}


def play(console: Console, text: str = "[red]#### 3") -> None:
    """A run of one step and one evaluation."""
    group = make_group((0.2, 1.2), rollouts=(make_rollout(text),) * 2)
    console.start(CARD, [])
    console.write(make_step_report(group, step=3, reward__mean=0.7, loss__total=-0.123456))
    console.evaluated(EvalReport(3, 3, {"eval/accuracy": 0.25, "eval/prompts": 8.0}, 1.0))
    console.finish(SUMMARY)


SUMMARY_LINES = [
    "finished: step 20 of 20 in 12.3 s",
    "held-out accuracy: 0.250 before, 0.500 after",
    "run folder: runs/one",
    "page: runs/one/report.html (live: podium report runs/one)",
    "trained model: runs/one/final",
    "export it with: podium export runs/one OUT",
]


def test_an_adapter_can_be_taken_away_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    Console(mode="quiet").finish({**SUMMARY, "model": str(tmp_path)})
    assert capsys.readouterr().out.endswith("podium export runs/one OUT (--merge for plain weights)\n")


def test_without_a_terminal_it_prints_a_line_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    play(Console())
    assert capsys.readouterr().out.splitlines() == [
        "arithmetic: grpo on embedded",
        "runs/one",
        "step 3/20  reward 0.7  correct –  kept –  loss -0.123  entropy –  length –  mismatch –  grad –",
        "held-out at step 3: accuracy 0.25  prompts 8",
        *SUMMARY_LINES,
    ]


def test_json_prints_one_object_a_line_with_every_metric(capsys: pytest.CaptureFixture[str]) -> None:
    play(Console(mode="json"))
    start, step, evaluated, finish = map(json.loads, capsys.readouterr().out.splitlines())
    assert start == {"event": "start", **CARD}
    assert step == {"event": "step", "step": 3, "reward/mean": 0.7, "loss/total": -0.123456}
    assert evaluated == {"event": "eval", "step": 3, "eval/accuracy": 0.25, "eval/prompts": 8.0}
    assert finish == {"event": "finish", **SUMMARY}


def test_quiet_prints_the_summary_only(capsys: pytest.CaptureFixture[str]) -> None:
    play(Console(mode="quiet"))
    assert capsys.readouterr().out.splitlines() == SUMMARY_LINES


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich believes that it draws on one of 200 columns."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.usefixtures("terminal")
def test_on_a_terminal_it_draws_a_table_the_progress_and_a_rollout(capsys: pytest.CaptureFixture[str]) -> None:
    play(Console())
    out = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert "step  reward  correct" in out
    assert "3/20" in out
    assert "held-out at step 3: accuracy 0.25" in out
    assert "'What is 1 + 2?' → '[red]#### 3' scores 1.2" in out
    assert "finished: step 20 of 20 in 12.3 s" in out


@pytest.mark.usefixtures("terminal")
def test_a_rollout_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    play(Console(mode="live"), text="\x1b]0;owned\x07[bold]x[/bold]\x1b[2J")
    out = capsys.readouterr().out
    assert "\x1b]0;owned" not in out
    assert "\x1b[2J" not in out
    assert r"\x1b]0;owned\x07[bold]x[/bold]\x1b[2J" in out


@pytest.mark.usefixtures("terminal")
def test_a_broken_run_gives_the_terminal_back(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(mode="live")
    console.start(CARD, [])
    assert "\x1b[?25l" in capsys.readouterr().out  # the cursor is hidden
    console.fail()
    assert "\x1b[?25h" in capsys.readouterr().out  # and shown again


@pytest.mark.usefixtures("terminal")
def test_a_resumed_run_starts_its_progress_where_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(mode="live")
    console.start(CARD, [{"step": 6}, {"step": 7}])
    console.fail()
    assert "7/20" in capsys.readouterr().out


@pytest.mark.usefixtures("terminal")
def test_the_time_left_is_that_of_the_last_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: clock[0])
    console = Console(mode="live")
    console.start(CARD, [])
    for step in (1, 2):
        clock[0] += 60.0
        console.write(make_step_report(step=step))
    console.fail()
    # 18 steps of 60 s; rich's own guess looks back 30 s and would have none
    assert "18 min left" in capsys.readouterr().out


@pytest.mark.usefixtures("terminal")
def test_a_rollout_stays_long_enough_to_be_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: clock[0])
    console = Console(mode="live")
    console.start(CARD, [])
    shown = []
    for step, at in ((1, 100.0), (2, 104.0), (3, 105.0), (4, 110.0)):
        clock[0] = at
        texts = (make_rollout(f"low {step}"), make_rollout(f"high {step}"))
        console.write(make_step_report(make_group((0.2, 1.2), rollouts=texts), step=step))
        shown.append(console._rollout)
    console.fail()
    # the best and the worst in turn, five seconds each
    assert [text.partition("→ ")[2] for text in shown] == [
        "'high 1' scores 1.2",
        "'high 1' scores 1.2",
        "'high 3' scores 1.2",
        "'low 4' scores 0.2",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(7.4, "7 s"), (119, "119 s"), (121, "2 min"), (3599, "1 h 00 min"), (12_000, "3 h 20 min")]
)
def test_durations_are_said_as_people_do(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_summary_says_where_the_time_went() -> None:
    # 20 steps of 5 + 3 + 1.99 + 0.01 s: what is below half a percent is not worth a word
    text = summary_text(SUMMARY, {"train": 60.0, "rollout": 100.0, "sync": 0.2, "eval": 39.8}, 20)
    assert "a step took 10 s: rollout 50%, train 30%, eval 20%" in text.splitlines()


def test_a_run_that_failed_prints_nothing_more(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(mode="plain")
    console.start(CARD, [])
    capsys.readouterr()
    console.fail()
    assert capsys.readouterr().out == ""


GO_ON = f"continue with: podium resume {SUMMARY['folder']}"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"accuracy_before": None, "accuracy_after": None}, [SUMMARY_LINES[0], *SUMMARY_LINES[2:]]),
        (
            {"state": "stopped", "step": 4, "model": None},
            ["stopped: step 4 of 20 in 12.3 s", *SUMMARY_LINES[1:-2], GO_ON],
        ),
        (
            {"step": 12, "message": "run.epochs = 2 is reached"},
            [
                "finished: step 12 of 20 in 12.3 s",
                "ended early: run.epochs = 2 is reached",
                *SUMMARY_LINES[1:],
            ],
        ),
        (
            {"skipped_steps": 2},
            [
                *SUMMARY_LINES[:2],
                "steps without an update: 2 (no group had signal, or no finite gradient)",
                *SUMMARY_LINES[2:],
            ],
        ),
        (
            {"dropped_groups": 3, "restarts": 2},
            [
                *SUMMARY_LINES[:2],
                "prompts dropped because the engine failed on them: 3",
                "resumed: 2 times",
                *SUMMARY_LINES[2:],
            ],
        ),
        ({"restarts": 1}, [*SUMMARY_LINES[:2], "resumed: once", *SUMMARY_LINES[2:]]),
    ],
)
def test_the_summary_says_what_there_is_to_say(changes: dict[str, Any], expected: list[str]) -> None:
    assert summary_text(SUMMARY | changes).splitlines() == expected
