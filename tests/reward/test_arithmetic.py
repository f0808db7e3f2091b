from typing import Any

import pytest

from podium.reward.arithmetic import arithmetic
from podium.reward.arithmetic_lax import arithmetic_lax
from podium.reward.scoring.stage import declared_range
from tests.builders import make_prompt, make_rollout


def score(text: str, answer: object = "85", *, reward: Any = arithmetic) -> float:
    return reward(make_prompt(answer=answer), make_rollout(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("37 + 48 = 85\n#### 85", 1.2),
        ("#### 85 ", 1.2),
        ("####85", 1.2),
        ("####\n85", 1.2),
        ("#### 85.", 1.2),
        ("#### 085", 1.2),
        ("#### 85 because", 1.2),
        ("#### 84", 0.2),
        ("#### -85", 0.2),
        ("#### 85.5", 0.0),  # no integer follows
        ("#### 85.0", 0.0),
        ("#### 85/1", 0.0),
        ("#### 170/2", 0.0),
        ("#### 85,000", 0.2),  # another number, not 85
        ("#### 85 000", 0.2),
        ("#### 85{,}000", 0.2),
        (r"#### 85\,000", 0.2),
        ("#### –85", 0.2),
        ("#### x85", 0.0),
        ("####", 0.0),
        ("85", 0.0),
        ("", 0.0),
        ("#### 85 #### 84", 0.2),  # the last marker counts
        ("#### 84 #### 85", 1.2),
        ("#### 85 ####", 0.0),
        ("##### 85", 1.2),
    ],
)
def test_the_integer_after_the_last_marker_is_scored(text: str, expected: float) -> None:
    assert score(text) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### 85", 1.2),
        ("it is 85", 1.0),
        ("####", 0.2),
        ("#### 84", 0.2),
        ("85 or 84", 0.0),  # the last integer counts
        ("nothing", 0.0),
        ("85 ####", 1.2),
    ],
)
def test_the_lax_rule_scores_the_bare_marker_and_the_last_integer(text: str, expected: float) -> None:
    assert score(text, reward=arithmetic_lax) == pytest.approx(expected, abs=1e-12)


def test_negative_answers_are_compared_as_numbers() -> None:
    assert score("#### -4", "-4") == 1.2
    assert score("#### 4", "-4") == 0.2
    assert score("#### -4", -4) == 1.2
    assert score("#### –4", "-4") == score("#### −4", "-4") == 1.2


@pytest.mark.parametrize("text", ["#### 12,000", "#### 12000", "#### 12 000", "#### 12{,}000", r"#### 12\,000"])
def test_groups_of_three_digits_are_one_integer(text: str) -> None:
    assert score(text, "12000") == 1.2
    assert score(text, "12") == 0.2


def test_an_expected_answer_that_is_no_integer_raises() -> None:
    with pytest.raises(ValueError, match="a word"):
        score("#### 4", "a word")


def test_its_range_is_declared_and_its_highest_value_is_reached() -> None:
    assert declared_range(arithmetic) == (0.0, 1.2)
    assert score("#### 85") == declared_range(arithmetic)[1]
