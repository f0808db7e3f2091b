"""Whatever others wrote, no control character of it reaches the terminal."""

import ast
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import podium
from podium import cli, declare_range
from podium.cli import main
from podium.errors import InputError
from podium.records import Prompt, Rollout
from podium.remote.workers import MAX_FILE_BYTES
from podium.report.console import Console
from podium.settings.tables import Settings
from podium.untrusted import printable, say, warn
from tests.commands import fork_server
from tests.conftest import small_tables

ROOT = Path(podium.__file__).parent
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\x00\u202egnp"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, tab\t, line\n", "plain, tab\t, line\n"),
        ("ünï ☃ 漢字\u3000\xa0 👩\u200d🚀", "ünï ☃ 漢字\u3000\xa0 👩\u200d🚀"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\rb\x07\x7f\x9b", "a\\rb\\x07\\x7f\\x9b"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\ud800", "\\ud800"),
        ("back\\slash", "back\\slash"),
    ],
)
def test_control_characters_are_shown_and_all_others_kept(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_both_ways_to_print_escape(capsys: pytest.CaptureFixture[str]) -> None:
    say(EVIL)
    warn(EVIL)
    printed = capsys.readouterr()
    assert not CONTROL.search(printed.out + printed.err)
    assert "owned" in printed.out
    assert "owned" in printed.err


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_prints_by_itself(path: Path) -> None:
    if path == ROOT / "untrusted.py":
        return
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]
    assert not [call for call in calls if ast.unparse(call) in ("sys.stdout.write", "sys.stderr.write")]


@declare_range(0.0, 1.0)
def evil(prompt: Prompt, rollout: Rollout) -> float:
    print(EVIL, "printed by the reward")
    os.write(2, EVIL.encode() + b" written\xff by the reward\n")
    raise ValueError(EVIL)


@pytest.mark.parametrize("mode", ["plain", "json", "live", "quiet"])
def test_a_rewards_error_and_prints_reach_the_terminal_escaped(
    mode: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = small_tables(tmp_path / "run") | {"reward": [{"name": "tests.test_terminal:evil"}]}
    tables["report"] = [{"name": "console"}]
    (tmp_path / "settings.toml").write_text(Settings.from_dict(tables).to_toml())
    monkeypatch.setattr(cli, "_console_mode", lambda options: mode)
    assert main(["train", str(tmp_path / "settings.toml")]) == 1
    printed = capfd.readouterr()
    everything = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", printed.out) if mode == "live" else printed.out
    assert not CONTROL.search(everything + printed.err)
    assert "\\x1b]0;owned" in printed.err
    assert "printed by the reward" in printed.err
    assert "written\\xff by the reward" in printed.err


def test_bad_input_is_told_escaped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "settings.toml").write_text(f"[model]\nname = {json.dumps(EVIL)}\n")
    for command in ("train", "check"):
        assert main([command, str(tmp_path / "settings.toml")]) == InputError.exit_code
    printed = capfd.readouterr()
    assert not CONTROL.search(printed.out + printed.err)


def test_the_live_table_shows_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(mode="live")
    console._progress = SimpleNamespace()  # type: ignore[assignment]
    console._held_out = console._rollout = EVIL
    texts: list[Any] = [each for each in console._table().renderables if hasattr(each, "plain")]
    assert len(texts) == 2
    assert not CONTROL.search("".join(text.plain for text in texts))
    console._print({}, EVIL)
    assert not CONTROL.search(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out))


@declare_range(0.0, 1.0)
def printing(prompt: Prompt, rollout: Rollout) -> float:
    print("a line of the reward", flush=True)
    return float(len(rollout.text) % 2)


def test_a_reward_may_print_into_a_log_that_is_larger_than_it_may_write(tmp_path: Path) -> None:
    tables = small_tables(tmp_path / "run", steps=1) | {"reward": [{"name": "tests.test_terminal:printing"}]}
    (tmp_path / "settings.toml").write_text(Settings.from_dict(tables).to_toml())
    log = tmp_path / "log"
    with log.open("ab") as file:
        file.truncate(MAX_FILE_BYTES + 4096)  # takes no room on the disk
    process = fork_server().start("train", str(tmp_path / "settings.toml"), stdout=log, stderr=log)
    status = process.wait(280)
    with log.open("rb") as file:
        file.seek(MAX_FILE_BYTES + 4096)
        written = file.read().decode()
    assert status == 0, written
    assert written.count("a line of the reward") == 16  # of several workers, so line breaks may follow later
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert line.get("reward/failed", 0) == 0


def test_a_traceback_is_escaped_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise RuntimeError(EVIL)

    monkeypatch.setattr(cli, "main", fail)
    with pytest.raises(SystemExit) as ended:
        cli.console()
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert not CONTROL.search(told)
