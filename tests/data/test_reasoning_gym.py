"""The real package: rows of its tasks, and its options as settings."""

import random
from typing import Any

import pytest

from podium.data.reasoning_gym import INSTRUCTION, reasoning_gym
from podium.errors import InputError
from podium.settings.lookup import validate_options


def test_a_row_is_the_tasks_question_with_the_instruction_below() -> None:
    (row,) = reasoning_gym(task="chain_sum", size=1, seed=3)
    entry = row.metadata["entry"]
    assert row.messages == ({"role": "user", "content": f"{entry['question']}\n\n{INSTRUCTION}"},)
    assert "<answer> and </answer>" in INSTRUCTION
    expression = entry["metadata"]["expression"]  # such as "4 + 3"
    assert row.answer == str(sum(int(term.replace(" ", "")) for term in expression.replace("- ", "+ -").split("+")))
    assert row.reward == ("reasoning_gym",)
    assert row.metadata["task"] == "chain_sum"


def test_the_instruction_is_an_option() -> None:
    (plain,) = reasoning_gym(task="chain_sum", size=1, instruction="")
    assert plain.messages[0]["content"] == plain.metadata["entry"]["question"]
    (other,) = reasoning_gym(task="chain_sum", size=1, instruction="Be brief.")
    assert other.messages[0]["content"].endswith(" =\n\nBe brief.")


def test_size_and_seed_and_the_tasks_own_options_make_the_rows() -> None:
    rows = reasoning_gym(task="chain_sum", size=20, config={"min_terms": 3, "max_terms": 3, "max_digits": 1})
    assert len(rows) == 20
    assert {row.metadata["entry"]["metadata"]["num_terms"] for row in rows} == {3}
    assert reasoning_gym(task="chain_sum", size=20, seed=1) != reasoning_gym(task="chain_sum", size=20, seed=2)


@pytest.mark.parametrize("task", ["chain_sum", "list_functions", "countdown", "knights_knaves"])
def test_the_same_options_make_the_same_rows(task: str) -> None:
    """Also of list_functions, which draws from the global generator."""
    before = random.getstate()
    first = reasoning_gym(task=task, size=5)
    assert random.getstate() == before
    random.random()
    assert reasoning_gym(task=task, size=5) == first


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"task": "chain_sums"}, "data.task = 'chain_sums' is not a task of reasoning-gym; did you mean 'chain_sum'? "),
        ({"task": ""}, "data.task = '' is not a task of reasoning-gym; Tasks: ab, "),
        ({"task": "composite"}, "data.task = 'composite' is not offered: give one [[data]] table for each"),
        (
            {"task": "chain_sum", "config": {"terms": 3}},
            "data.config.terms is not an option of chain_sum; valid: allow_negation, max_digits, ",
        ),
        ({"task": "chain_sum", "config": {"seed": 3}}, "data.config.seed is not an option of chain_sum; valid: "),
        ({"task": "chain_sum", "config": {"min_terms": 9}}, "cannot make its rows: max_terms must be >= min_terms"),
        ({"task": "chain_sum", "config": {"min_terms": "two"}}, "cannot make its rows: "),
    ],
)
def test_what_the_package_does_not_know_is_one_message(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        reasoning_gym(**options)
    assert complaint in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("options", [{}, {"task": 3}, {"task": "ab", "size": 0}, {"task": "ab", "seed": -1}])
def test_options_are_checked_before_any_row_is_made(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"^data\[0\]\.(task|size|seed) "):
        validate_options("data[0]", reasoning_gym, options)


def test_without_the_package_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.data.reasoning_gym.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install reasoning-gym"):
        reasoning_gym(task="chain_sum")
