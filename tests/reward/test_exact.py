import pytest

from podium.reward.exact import exact
from podium.reward.scoring.stage import declared_range
from podium.reward.scoring.verifiers import normal_form
from tests.builders import make_prompt, make_rollout


def score(text: str, answer: object) -> float:
    return exact(make_prompt(answer=answer), make_rollout(text))


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("Paris", "Paris", 1.0),
        (" paris.\n", "Paris", 1.0),
        ("The Eiffel Tower!", "eiffel  tower", 1.0),
        ("Paris, France", "Paris", 0.0),
        ("Pari", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("theatre", "atre", 0.0),  # articles are whole words
        ("7", 7, 1.0),
        ("rome", ["Paris", "Rome"], 1.0),
        ("oslo", ["Paris", "Rome"], 0.0),
        ("a", "A", 1.0),  # a choice, not an article
    ],
)
def test_the_answer_is_compared_in_normal_form(text: str, answer: object, expected: float) -> None:
    assert score(text, answer) == expected


def test_the_normal_form_has_no_case_punctuation_articles_or_double_spaces() -> None:
    assert normal_form("  The “quick”,  brown-fox: an A\tB ") == "“quick” brownfox b"


def test_its_range_is_declared() -> None:
    assert declared_range(exact) == (0.0, 1.0)
