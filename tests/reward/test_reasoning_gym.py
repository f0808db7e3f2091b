"""Scores by the real package; and no policy can make its scorers run code."""

import contextlib
import os
import resource
import warnings
from functools import cache
from pathlib import Path

import pytest
from reasoning_gym.factory import DATASETS

from podium.data.reasoning_gym import NOT_OFFERED
from podium.data.reasoning_gym import reasoning_gym as make_rows
from podium.records import Prompt
from podium.reward.reasoning_gym import is_plain_expression, reasoning_gym
from tests.builders import make_prompt, make_rollout

TASKS = sorted(set(DATASETS) - set(NOT_OFFERED))


@cache
def prompt_of(task: str) -> Prompt:
    """Some tasks take seconds to make a row. Scoring does not change it, as a test below says."""
    (row,) = make_rows(task=task, size=1)
    return make_prompt(answer=row.answer, metadata=row.metadata, reward=row.reward)


def score(prompt: Prompt, text: str) -> float:
    return reasoning_gym(prompt, make_rollout(text))


def test_the_answer_is_what_stands_in_the_last_tags() -> None:
    prompt = prompt_of("chain_sum")
    assert score(prompt, f"Let me see.\n<answer> {prompt.answer}\n</answer>") == 1.0
    assert score(prompt, f"<answer>no</answer> or rather <answer>{prompt.answer}</answer>") == 1.0
    assert score(prompt, f"<answer>{prompt.answer}</answer> or rather <answer>no</answer>") == 0.0


@pytest.mark.parametrize("text", ["", "{}", "<answer>{}", "{}</answer>", "<ANSWER>{}</ANSWER>", "<answer></answer>"])
def test_without_an_answer_in_tags_a_sum_is_worth_nothing(text: str) -> None:
    prompt = prompt_of("chain_sum")
    assert score(prompt, text.format(prompt.answer)) == 0.0


def test_partial_credit_is_the_tasks_own() -> None:
    prompt = prompt_of("chain_sum")
    # the package's rule where an answer holds the right one: its share of the characters
    answer = str(prompt.answer)
    assert score(prompt, f"<answer>{answer} apples</answer>") == pytest.approx(len(answer) / len(f"{answer} apples"))


def test_a_task_with_many_right_answers_takes_each() -> None:
    prompt = prompt_of("countdown")
    assert score(prompt, f"<answer>{prompt.answer}</answer>") == 1.0
    assert score(prompt, f"<answer>0 + ({prompt.answer})</answer>") < 1.0  # a number that is not among those given


def test_a_scorer_that_cannot_read_the_answer_gives_what_an_empty_one_gets() -> None:
    """That of prime_factorization raises on words."""
    prompt = prompt_of("prime_factorization")
    assert score(prompt, "<answer>many</answer>") == score(prompt, "") == 0.0


def test_the_entry_is_not_changed_by_scoring() -> None:
    prompt = prompt_of("word_sorting")
    before = repr(prompt.metadata)
    score(prompt, "<answer>a, b</answer>")
    assert repr(prompt.metadata) == before


def test_a_row_of_another_source_is_told_and_not_scored() -> None:
    with pytest.raises(ValueError, match="the row does not come from the data source reasoning_gym"):
        score(make_prompt(), "<answer>3</answer>")


TOUCH = "__import__('pathlib').Path('touched').touch()"
ATTACKS = [
    TOUCH,
    f"[{TOUCH}]",
    f"[[{TOUCH}]]",
    f"3 + {TOUCH}",
    f"{TOUCH} + 3!",
    f"[x for x in [{TOUCH}]]",
    "().__class__.__base__.__subclasses__()",
    f"{{'a': {TOUCH}}}",
]


@pytest.mark.parametrize("task", TASKS)
def test_no_task_runs_what_the_policy_writes(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prompt = prompt_of(task)
    for attack in ATTACKS:
        value = score(prompt, f"<answer>{attack}</answer>")
        assert 0.0 <= value < 1.0
    assert os.listdir(tmp_path) == []


def test_the_attacks_do_work_where_nothing_guards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test above would prove nothing: the package's own scorer of a matrix runs them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("podium.reward.reasoning_gym.is_plain_expression", lambda text: True)
    with contextlib.suppress(Exception), warnings.catch_warnings():
        score(prompt_of("binary_matrix"), f"<answer>{TOUCH}</answer>")
    assert os.listdir(tmp_path) == ["touched"]


@pytest.mark.parametrize("task", TASKS)
def test_every_tasks_own_answer_gets_its_highest_score(task: str) -> None:
    prompt = prompt_of(task)
    value = score(prompt, f"<answer>{prompt.answer}</answer>")
    assert value == 1.0 if prompt.answer is not None else 0.0 <= value <= 1.0


CONSTANTS = ["0", "1", "-1", "0.5", "8*3*1*1", "nan", "nan+nanj", "-nan", "yes", "True", "A", "[]", "infeasible"]


@pytest.mark.parametrize("task", TASKS)
def test_no_constant_answer_is_paid_on_every_row(task: str) -> None:
    """Nor is the official answer of another row."""
    rows = [make_prompt(answer=row.answer, metadata=row.metadata) for row in make_rows(task=task, size=4, seed=7)]
    if len({str(row.answer) for row in rows}) < 2:
        return
    for constant in [*CONSTANTS, *(str(row.answer) for row in rows if row.answer is not None)]:
        assert not all(score(row, f"<answer>{constant}</answer>") == 1.0 for row in rows), constant


@pytest.mark.parametrize(
    ("task", "answers"),
    [
        ("puzzle24", ["8*3*1*1", "24", "4*6", "{0}+0*{0}", "({0})/1", "{0}+0.5", "int({0})"]),
        ("coin_flip", ["0", "0.", "0.1", "nan", "{0}1e999", "1e99999999999", "1/0"]),
        ("complex_arithmetic", ["nan", "nan+nanj", "NaN", "-nan - nani", "nani"]),
    ],
)
def test_what_a_scorer_would_pay_for_though_it_is_wrong_is_unanswered(task: str, answers: list[str]) -> None:
    for row in make_rows(task=task, size=4, seed=1):
        prompt = make_prompt(answer=row.answer, metadata=row.metadata)
        assert score(prompt, f"<answer>{row.answer}</answer>") == 1.0
        for answer in answers:
            assert score(prompt, f"<answer>{answer.format(row.answer)}</answer>") <= 0.01, answer


def test_24_may_be_made_in_any_way_with_the_numbers_of_the_row() -> None:
    entry = {"question": "", "answer": "10*(8 - 5) - 6", "metadata": {"numbers": [8, 5, 10, 6]}}
    prompt = make_prompt(metadata={"task": "puzzle24", "options": {}, "entry": entry})
    assert score(prompt, "<answer>(8 - 5) * 10 - 6</answer>") == 1.0
    assert score(prompt, "<answer>-6 + 10 * (-5 + 8)</answer>") == 1.0
    assert score(prompt, "<answer>10*(8 - 5) - 5</answer>") <= 0.01
    for without_a_sign in ("10(8 - 5) - 6", "(8 - 5)10 - 6", "010*(8 - 5) - 6"):
        assert score(prompt, f"<answer>{without_a_sign}</answer>") <= 0.01, without_a_sign
    entry = {"question": "", "answer": "49/2", "metadata": {"numbers": [7, 7, 2, 1]}}
    prompt = make_prompt(metadata={"task": "puzzle24", "options": {}, "entry": entry})
    assert score(prompt, "<answer>7*7/2*1</answer>") <= 0.01  # 24.5, which the scorer cuts to 24


def test_an_official_answer_that_was_not_worked_out_is_no_row() -> None:
    rows = make_rows(task="intermediate_integration", size=60, seed=3)
    assert len(rows) == 60
    assert not any("Integral" in row.answer for row in rows)
    for row in rows[:20]:
        prompt = make_prompt(answer=row.answer, metadata=row.metadata)
        assert score(prompt, f"<answer>{row.answer}</answer>") == 1.0


def test_a_scorer_that_would_eat_memory_is_contained() -> None:
    prompt = prompt_of("rubiks_cube")
    before, limits = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, resource.getrlimit(resource.RLIMIT_AS)
    for answer in ("-987654321", "U987654321", "R999999999999"):
        assert score(prompt, f"<answer>{answer}</answer>") <= 0.05
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


@pytest.mark.parametrize(
    "text",
    ["", "1", "[[1, 0], [0, 1]]", "['a', \"b\"]", "2*x**3/3 + C", "exp(2*x)*sin(x)", "(3 + 4) * 2", "-(1)", "1 2 3",
     "_ Q _ _\nQ _ _ _", "[(1, 2), (3, 4)]", "log(x + 1)**2"],
)  # fmt: skip
def test_expressions_are_plain(text: str) -> None:
    assert is_plain_expression(text)


@pytest.mark.parametrize(
    "text",
    [*ATTACKS, "f(x)", "print ('a')", "print #+\n(1)", "print\\\n(1)", "(print)('a')", "['a'](1)", "'a'(1)", "a.b",
     "lambda: 1", "f'{x}'", "rb'x'", "x if y else z", "[x for x in y]", "a := 1", "a = 1", "3!", "{1}", "x[0", "'a",
     "a; b", "@a", "a\n(b)", "sin.x(1)", "xsin(1)", "yield", "`a`", "１(2)", "await x"],
)  # fmt: skip
def test_anything_that_could_call_or_name_more_is_not(text: str) -> None:
    assert not is_plain_expression(text)
