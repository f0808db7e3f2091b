"""`podium check --rewards`: good rewards pass, each kind of bad one is found and named, through the command line."""

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w

from podium.check.rewards import HOSTILE, _try_all
from podium.cli import main
from podium.reward.scoring.stage import NamedReward, Scoring, bound_reward
from podium.settings.lookup import find
from tests.builders import make_prompt
from tests.conftest import small_tables
from tests.reward.judging import Reply, serving

REWARDS = r"""
import time
from podium import declare_range, gold_answer, register_reward

@declare_range(0.0, 1.0)
def right(prompt, rollout):
    return float(rollout.text == str(prompt.answer))

@declare_range(0.0, 1.0)
@gold_answer(lambda prompt: f"<{prompt.answer}>")
def tagged(prompt, rollout):
    return float(rollout.text == f"<{prompt.answer}>")

@declare_range(0.0, 1.0)
def wants_tags(prompt, rollout):
    return float(rollout.text == f"<{prompt.answer}>")

@declare_range(0.0, 1.0)
def everything(prompt, rollout):
    return 1.0

@declare_range(0.0, 1.0)
def fragile(prompt, rollout):
    if "\0" in rollout.text:
        raise KeyError("NUL")
    if len(rollout.text) == 1_000_000:
        time.sleep(600)
    return right(prompt, rollout)

@declare_range(0.0, 1.0)
def breaks_on_brackets(prompt, rollout):
    return 7.0 if rollout.text.startswith("((") else right(prompt, rollout)

def without_range(prompt, rollout):
    return 0.0

@register_reward("classy")
class Classy:
    min_value, max_value = -3, 3
    gold = staticmethod(lambda prompt: "yes " + prompt.answer)

    def __call__(self, prompt, rollout):
        return 3 if rollout.text == "yes " + prompt.answer else -3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


def checked(
    here: Path, capsys: pytest.CaptureFixture[str], rows: list[dict[str, Any]] | None, *rewards: dict[str, Any]
) -> tuple[int, str]:
    """Exit code and report; `rows` or, with None, the arithmetic task."""
    tables = small_tables(here / "run") | {"reward": list(rewards)}
    if rows is not None:
        (here / "rows.jsonl").write_text("".join(json.dumps({"prompt": "q", **row}) + "\n" for row in rows))
        tables["data"] = [{"name": "jsonl", "path": "rows.jsonl"}]
    (here / "run.toml").write_text(tomli_w.dumps(tables))
    code = main(["check", "run.toml", "--rewards", "--rows", "20"])
    assert not (here / "run").exists()
    return code, capsys.readouterr().out


ANSWERS = [{"answer": str(n)} for n in range(1, 7)]


def row_of(report: str, reward: str) -> list[str]:
    """The cells of a reward's line: right, others', hostile, without a value, median and longest time."""
    (line,) = [line for line in report.splitlines() if line.startswith(f"{reward} ")]
    return [cell.strip() for cell in line.split("  ") if cell.strip()][1:]


@pytest.mark.parametrize("reward", ["arithmetic", "rewards.py:right", "rewards.py:tagged", "rewards.py:classy"])
def test_a_good_reward_passes(reward: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = checked(here, capsys, ANSWERS, {"name": reward})
    cells = row_of(report, reward)
    assert cells[:3] == ["6 of 6", "0 of 6", f"0 of {len(HOSTILE)}"]
    assert 0 < float(cells[4]) <= float(cells[5])
    assert (code, report.splitlines()[-1]) == (0, "ok")


@pytest.mark.parametrize("thinking", ["ignore", "count"])
@pytest.mark.parametrize("name", ["exact", "gsm8k"])
def test_answers_to_a_prompt_that_ends_inside_the_thinking_close_it_first(name: str, thinking: str) -> None:
    options = {"thinking": thinking}
    reward = NamedReward(name, bound_reward(find("reward", name), options), options=options)
    prompts = [make_prompt(n, answer=str(n), opens_thinking=True) for n in range(4)]
    tokenizer = SimpleNamespace(encode=lambda text, **_: [0])
    (findings,) = asyncio.run(_try_all(Scoring({name: reward}, [name], 1), prompts, tokenizer, 4))
    assert len(findings.passed("gold")) == 4
    assert findings.is_good


def test_the_first_rows_are_not_all_that_is_looked_at(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"answer": str(n)} for n in range(100)]
    assert row_of(checked(here, capsys, rows, {"name": "rewards.py:right"})[1], "rewards.py:right")[0] == "20 of 20"
    rows[95] = {"answer": [["not", "a text"]]}  # the row that the 20 end with; it says nothing, so 19 are left
    assert row_of(checked(here, capsys, rows, {"name": "rewards.py:right"})[1], "rewards.py:right")[0] == "19 of 19"


def test_right_answers_that_do_not_pass_are_named_with_the_way_out(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = checked(here, capsys, ANSWERS, {"name": "rewards.py:wants_tags"})
    assert code == 2
    assert row_of(report, "rewards.py:wants_tags")[0] == "0 of 6"
    assert "right answer not passed: row 1 of jsonl, answer '1', text '1': 0.0" in report
    assert "rewards.py:wants_tags: and 3 more" in report
    assert "see podium.gold_answer" in report
    assert report.splitlines()[-1].startswith("not ok")


def test_a_reward_that_accepts_everything_is_found(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = checked(here, capsys, ANSWERS, {"name": "rewards.py:everything"})
    assert code == 2
    assert row_of(report, "rewards.py:everything")[:3] == ["6 of 6", "6 of 6", f"{len(HOSTILE)} of {len(HOSTILE)}"]
    assert "another row's answer passed: row 1 of jsonl, answer '1', text '2': 1.0" in report
    assert "hostile text passed: row 1 of jsonl, answer '1', text nothing: 1.0" in report


def test_the_same_answer_of_another_row_is_not_taken_for_a_wrong_one(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = checked(here, capsys, [{"answer": "Yes"}, {"answer": " yes "}, {"answer": "no"}], {"name": "exact"})
    assert (code, row_of(report, "exact")[:2]) == (0, ["3 of 3", "0 of 3"])
    code, report = checked(here, capsys, [{"answer": "yes"}] * 3, {"name": "exact"})
    assert (code, row_of(report, "exact")[:2]) == (0, ["3 of 3", "0 of 0"])


def test_a_few_equal_answers_in_another_spelling_are_shown_and_forgiven(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"answer": "the cat"}, {"answer": "cat"}, {"answer": "dog"}]
    code, report = checked(here, capsys, rows, {"name": "exact"})
    assert (code, row_of(report, "exact")[1]) == (0, "1 of 3")
    assert "another row's answer passed: row 1 of jsonl, answer 'the cat', text 'cat': 1.0" in report


def test_texts_that_break_a_reward_are_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = checked(here, capsys, ANSWERS, {"name": "rewards.py:fragile", "timeout_s": 1.0})
    assert code == 0  # it abstains there, which a run survives
    cells = row_of(report, "rewards.py:fragile")
    assert cells[3] == "3"
    assert float(cells[5]) >= 1000
    assert re.search(r"text a NUL: KeyError at rewards\.py:\d+: 'NUL'", report)
    assert "text a million letters: timeout after 1 s" in report


def test_a_breach_of_contract_is_not_forgiven(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = checked(here, capsys, ANSWERS, {"name": "rewards.py:breaks_on_brackets"})
    assert code == 2
    assert (
        "text 50,000 open brackets: reward 'rewards.py:breaks_on_brackets' on prompt 0 (jsonl) returned 7.0" in report
    )


def test_programs_are_checked_where_rows_have_a_solution(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tests = ["assert add(1, 2) == 3"]
    rows: list[dict[str, Any]] = [{"answer": tests, "solution": "def add(a, b):\n    return a + b"}]
    code, report = checked(here, capsys, rows, {"name": "code"})
    assert (code, row_of(report, "code")[0]) == (0, "1 of 1")
    rows.append({"answer": tests, "solution": "def add(a, b):\n    return a - b"})
    code, report = checked(here, capsys, rows, {"name": "code"})
    assert (code, row_of(report, "code")[0]) == (2, "1 of 2")


def test_what_cannot_be_checked_is_listed_with_the_reason_and_a_judge_is_not_asked(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"answer": ["assert True"]}, {"answer": "1", "reward": "exact"}]
    with serving(lambda number, text: Reply("")) as server:
        judge = {"name": "judge", "base_url": server.base_url, "model": "m"}
        code, report = checked(here, capsys, rows, judge, {"name": "code"}, {"name": "rewards.py:without_range"})
    assert code == 0
    assert server.texts == []
    assert "judge: not checked: a model decides what is best" in report
    assert "code: not checked: no row says what a right answer looks like (podium.gold_answer)" in report
    assert "rewards.py:without_range: not checked: it declares no highest value" in report
    assert row_of(report, "exact")[0] == "1 of 1"


def test_rows_without_rewards_to_try_has_no_effect(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "run.toml").write_text(tomli_w.dumps(small_tables(here / "run")))
    assert main(["check", "run.toml", "--rows", "5"]) == 2
    assert capsys.readouterr().err == "podium: --rows has no effect without --rewards; add it or remove this one\n"
