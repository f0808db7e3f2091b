"""The rewards that compare texts in SQuAD's normal form: string_f1, puzzle, flan, search, search_f1 (and `exact`, which
has a file of its own)."""

from collections.abc import Callable
from typing import Any

import pytest

from podium.errors import InputError
from podium.records import Row
from podium.reward.exact import exact
from podium.reward.flan import flan
from podium.reward.puzzle import puzzle
from podium.reward.scoring.stage import declared_range
from podium.reward.search import search
from podium.reward.search_f1 import search_f1
from podium.reward.string_f1 import string_f1
from tests.builders import make_prompt, make_rollout


def score(reward: Callable[..., float], text: str, answer: Any, **options: Any) -> float:
    return reward(make_prompt(answer=answer), make_rollout(text), **options)


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("The Eiffel Tower", "eiffel tower", 1.0),
        ("Eiffel", "Eiffel Tower", 2 / 3),  # 1 shared, 1 + 2 words
        ("a tall tower in Paris", "Eiffel Tower", 1 / 3),  # tall tower in paris: 1 shared, 4 + 2 words
        ("red red red", "red", 0.5),  # 1 shared, 3 + 1 words
        ("red red", "red red blue", 0.8),  # 2 shared, 2 + 3 words
        ("London", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("the", "Paris", 0.0),
        ("blue", ["red", "blue"], 1.0),
        ("dark blue", ["red", "blue"], 2 / 3),
        ("<think>Paris</think> London", "Paris", 0.0),
        ("<think>London</think>\n<answer>Paris</answer>", "Paris", 1.0),
        ("7", 7, 1.0),
    ],
)
def test_string_f1(text: str, answer: Any, expected: float) -> None:
    assert score(string_f1, text, answer) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("Paris", "paris.", 1),
        ("<think>London? No.</think> Paris", "Paris", 1),
        ("<think>a</think>b</think><answer>The Paris</answer>", "Paris", 1),
        ("oslo", ["Rome", "Oslo"], 1),
        ("<think>Paris</think>", "Paris", 0),
        ("<think>Paris</think> Rome", "Paris", 0),
        ("It is Paris", "Paris", 0),
        ("", "Paris", 0),
    ],
)
def test_puzzle(text: str, answer: Any, expected: float) -> None:
    assert score(puzzle, text, answer) == expected


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("So. The answer is: Paris", "Paris", 1),
        ("The answer is:Paris.", "paris", 1),
        ("The answer is: Rome. The answer is: Paris", "Paris", 1),
        ("The answer is: (B)", ["A", "B"], 1),
        ("The answer is: A", "A", 1),
        ("The answer is: Paris. I hope it helps.", "Paris", 0),
        ("The answer is: Paris. The answer is: Rome", "Paris", 0),
        ("The answer is Paris", "Paris", 0),
        ("the answer is: Paris", "Paris", 0),
        ("Paris", "Paris", 0),
        ("The answer is:", "Paris", 0),
        ("", "Paris", 0),
    ],
)
def test_flan(text: str, answer: Any, expected: float) -> None:
    assert score(flan, text, answer) == expected


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("<finish>Paris</finish>", "Paris", 1),
        ("<answer>the Paris!</answer>", "paris", 1),
        ("<FINISH>\nParis\n</finish> done", "Paris", 1),
        ("<finish>Rome</finish> <answer>Paris</answer>", "Paris", 1),
        ("<finish>Rome</finish> <finish>Paris</finish>", "Paris", 1),
        ("<finish>Paris</finish>", ["Rome", "Paris"], 1),
        ("<finish>Paris</finish>", '["Rome", "Paris"]', 1),
        ("<finish>7</finish>", "[7, 8]", 1),
        ("<finish>draft notes</finish>", "[draft] notes", 1),  # no JSON
        ("<finish>Rome Paris</finish>", '["Rome", "Paris"]', 0),
        ("<finish>Paris</finish> <finish>Rome</finish>", "Paris", 0),
        ("<finish>Paris</finish> <answer></answer>", "Paris", 0),
        ("<finish>Paris</answer>", "Paris", 0),
        ("<finish>Paris", "Paris", 0),
        ("Paris", "Paris", 0),
        ("", "Paris", 0),
    ],
)
def test_search(text: str, answer: Any, expected: float) -> None:
    assert score(search, text, answer) == expected
    assert score(search_f1, text, answer) == pytest.approx(expected if "Rome Paris" not in text else 2 / 3)


def test_search_f1_is_a_share_and_has_a_floor() -> None:
    assert score(search_f1, "<finish>Eiffel</finish>", "Eiffel Tower") == pytest.approx(2 / 3)
    assert score(search_f1, "<finish>Rome</finish>", "Paris") == 0.0
    assert score(search_f1, "<finish>Rome</finish>", "Paris", floor=0.1) == 0.1
    assert score(search_f1, "<finish>Eiffel</finish>", "Eiffel Tower", floor=0.1) == pytest.approx(2 / 3)
    assert score(search_f1, "<finish> </finish>", "Paris", floor=0.1) == 0.0
    assert score(search_f1, "Paris", "Paris", floor=0.1) == 0.0


@pytest.mark.parametrize("check", [string_f1.check_answer, search.check_answer])
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "must be a text or a list of texts, not None"),
        ([], "the list of answers is empty"),
        ("", "nothing left to compare"),
        ("...", "nothing left to compare"),
        (["Paris", "!"], "nothing left to compare"),
        ([["Paris"]], "must be a text"),
        ({"a": 1}, "must be a text"),
    ],
)
def test_an_answer_that_nothing_could_equal_is_refused(check: Callable[[Row], None], answer: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        check(Row.from_text("?", answer=answer))


@pytest.mark.parametrize("reward", [string_f1, puzzle, flan, search, search_f1])
def test_their_ranges_are_declared(reward: Callable[..., float]) -> None:
    assert declared_range(reward) == (0.0, 1.0)


@pytest.mark.parametrize("reward", [exact, string_f1, puzzle])
def test_one_text_composed_in_two_ways_is_equal(reward: Callable[..., float]) -> None:
    assert reward(make_prompt(answer="caf\u00e9"), make_rollout("cafe\u0301")) == 1
    assert reward(make_prompt(answer="cafe\u0301"), make_rollout("caf\u00e9")) == 1
    assert reward(make_prompt(answer="caf\u00e9"), make_rollout("cafe")) == 0
