"""length, max_length, overlong; think_format, r1_format."""

import pytest

from podium.errors import InputError
from podium.records import Row
from podium.reward.length import length
from podium.reward.max_length import max_length
from podium.reward.overlong import overlong
from podium.reward.r1_format import r1_format
from podium.reward.scoring.stage import declared_range
from podium.reward.think_format import think_format
from podium.settings.lookup import validate_options
from tests.builders import make_prompt, make_rollout


@pytest.mark.parametrize(("characters", "expected"), [(0, 0), (1, 0.002), (250, 0.5), (500, 1), (501, 1), (9999, 1)])
def test_length_counts_characters_up_to_500(characters: int, expected: float) -> None:
    assert length(make_prompt(), make_rollout("x" * characters)) == expected


def test_length_has_another_full_score_if_asked_for() -> None:
    assert length(make_prompt(), make_rollout("x" * 5), full_at=20) == 0.25


@pytest.mark.parametrize(
    ("tokens", "answer", "expected"),
    [
        (100, 100, 1.0),
        (100, "100", 1.0),
        (92, 100, 0.92),  # 8 of 100 off
        (108, 100, 0.92),
        (0, 50, 0.5),
        (200, 100, 0.0),
        (201, 100, 0.0),  # never below 0
        (9999, 100, 0.0),
        (3, 2.5, 0.995),
    ],
)
def test_max_length_falls_evenly_to_both_sides_of_the_target(tokens: int, answer: object, expected: float) -> None:
    rollout = make_rollout(token_ids=(7,) * tokens)
    assert max_length(make_prompt(answer=answer), rollout, zero_at=100) == pytest.approx(expected, abs=1e-12)


def test_max_length_allows_8192_tokens_by_default() -> None:
    assert max_length(make_prompt(answer=2148), make_rollout(token_ids=(7,) * 100)) == 0.75  # 2048 of 8192 off


@pytest.mark.parametrize("answer", [None, "", "long", 0, -5, True, float("nan"), "inf", [100], 10**400])
def test_max_length_refuses_an_answer_that_is_no_number_of_tokens(answer: object) -> None:
    with pytest.raises(InputError, match="must be a number of tokens above 0"):
        max_length.check_answer(Row.from_text("?", answer=answer))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (101, -1.0), (5000, -1.0)],
)
def test_overlong_is_daposs_penalty(tokens: int, expected: float) -> None:
    """L_max = 100, L_cache = 20: 0 to 80 tokens, (80 − L) / 20 to 100, −1 beyond."""
    rollout = make_rollout("short", token_ids=(7,) * tokens)
    value = overlong(make_prompt(answer=None), rollout, free_tokens=80, buffer_tokens=20)
    assert value == pytest.approx(expected, abs=1e-12)
    assert str(value) != "-0.0"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "reward.free_tokens is required"),
        ({"free_tokens": 80}, "reward.buffer_tokens is required"),
        ({"free_tokens": -1, "buffer_tokens": 20}, "reward.free_tokens = -1: "),
        ({"free_tokens": 80, "buffer_tokens": 0}, "reward.buffer_tokens = 0: "),
    ],
)
def test_overlong_needs_its_two_numbers(options: dict, complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        validate_options("reward", overlong, options)
    assert str(caught.value).startswith(complaint)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0.0),
        ("just an answer", 0.0),
        ("think", 0.0),
        ("<think>on and on", 0.25),
        ("thought</think> answer", 0.25),
        ("</think>a<think>b", 0.25),
        ("</think><think>a</think>b", 0.25),  # the first of each counts
        ("<think></think>", 0.5),
        ("<think> \n </think> \n", 0.5),
        ("<think>thought</think>", 0.75),
        ("<think></think>answer", 0.75),
        ("<think>thought</think>answer", 1.0),
        ("so <think>\nthought\n</think>\n\nanswer", 1.0),
    ],
)
def test_think_format_has_five_tiers(text: str, expected: float) -> None:
    assert think_format(make_prompt(), make_rollout(text)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("thought</think><answer>5</answer>", 1),
        ("<think>thought</think>\n \n<answer>5</answer> done", 1),
        ("</think><answer></answer>", 1),
        ("a</think>b</think> <answer>5</answer>", 1),
        ("a</think> so <answer>5</answer>", 0),
        ("a</think><answer>5", 0),
        ("</answer></think><answer>5", 0),
        ("<answer>5</answer>", 0),
        ("<answer>5</answer></think>", 0),
        ("", 0),
    ],
)
def test_r1_format_wants_the_answer_right_after_the_thought(text: str, expected: float) -> None:
    assert r1_format(make_prompt(), make_rollout(text)) == expected


def test_their_ranges_are_declared() -> None:
    for reward in (length, max_length, think_format, r1_format):
        assert declared_range(reward) == (0.0, 1.0)
    assert declared_range(overlong) == (-1.0, 0.0)
