"""Every verifier of answers on the same kinds of text: thinking, cut, empty, a megabyte, other scripts.

Whether the right answer counts in each place was decided by hand. No verifier raises, and none takes long.
"""

import time
from typing import Any

import pytest

from podium.reward.scoring.stage import check_value
from podium.settings.lookup import find
from tests.builders import make_prompt, make_rollout
from tests.reward.scoring.test_thinking import CASES

MEGABYTE = 1_000_000
WHOLE = {"exact", "string_f1", "puzzle"}
"""They compare the whole answer, so words around it count."""
END = {"math", "strict_math"}
"""They look at the last 100,000 characters."""


def score(name: str, text: str, **others: Any) -> float:
    row, _, _, options = CASES[name]
    prompt = make_prompt(**row, **others)
    function = find("reward", name)
    started = time.process_time()
    value = check_value(name, function, function(prompt, make_rollout(text), **options), prompt)
    assert time.process_time() - started < 5
    assert value is not None
    return value


def is_right(name: str, text: str, **others: Any) -> bool:
    return score(name, text, **others) >= 1.0


PLACES: dict[str, tuple[str, set[str] | None]] = {
    "the answer alone": ("{right}", set()),
    "after the thinking": ("<think>{wrong}</think>\n{right}", set()),
    "after a long thought": ("<think>" + "so " * (MEGABYTE // 3) + "</think>\n{right}", set()),
    "after a million tags": ("<think>" * 50_000 + "</think>" * 50_000 + "{right}", set()),
    "within the thinking": ("<think>{right}</think>", None),
    "cut inside the thinking": ("<think>\n{right}\n", None),
    "cut inside a long thought": ("<think>" + "so " * (MEGABYTE // 3) + "\n{right}", None),
    "the thinking opened again": ("<think>a</think>\n<think>{right}", None),
    "nothing": ("", None),
    "white space": (" \n\t\u00a0\u3000", None),
    "nothing after the thinking": ("<think>{right}</think>\n ", None),
    "after a megabyte of words": ("word " * (MEGABYTE // 5) + "\n{right}", WHOLE),
    "after a megabyte of letters": ("a" * MEGABYTE + "\n{right}", WHOLE),
    "after a megabyte of line breaks": ("\n" * MEGABYTE + "{right}", set()),
    "before a megabyte of words": ("{right}\n" + "word " * (MEGABYTE // 5), WHOLE | END | {"flan"}),
    "after Arabic": ("الجواب هو التالي\n{right}", WHOLE),
    "after Chinese": ("答案如下\n{right}", WHOLE),
    "after Hebrew and marks of direction": ("\u202bשלום\u202c \u200f\n{right}", WHOLE),
    "after emoji": ("👩‍👩‍👧 🎉\n{right}", WHOLE),
    "after combining marks": ("e" + "\u0301" * 1000 + "\n{right}", WHOLE),
    "after a lone surrogate": ("\ud800\n{right}", WHOLE),
}
"""Place → the text, and the verifiers for which the right answer does not count there; None: for none of them."""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CASES)
def test_where_the_right_answer_counts(name: str, place: str) -> None:
    text, unless = PLACES[place]
    _, right, wrong, _ = CASES[name]
    filled = text.replace("{right}", right).replace("{wrong}", wrong)
    assert is_right(name, filled) == (unless is not None and name not in unless)


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_that_opens_the_thinking(name: str) -> None:
    _, right, wrong, _ = CASES[name]
    assert is_right(name, f"{wrong}</think>{right}", opens_thinking=True)
    assert not is_right(name, right, opens_thinking=True)
    assert not is_right(name, "so " * (MEGABYTE // 3) + right, opens_thinking=True)


OTHER_DIGITS = {"Arabic": "١٨", "Devanagari": "१८", "Chinese": "十八", "superscript": "¹⁸"}
NUMBERS = {
    "arithmetic": "#### {}",
    "gsm8k": "So {}.",
    "math": r"\boxed{{{}}}",
    "strict_math": r"\boxed{{{}}}",
    "answer_tag": "<answer>{}</answer>",
}


@pytest.mark.parametrize("script", OTHER_DIGITS)
@pytest.mark.parametrize("name", NUMBERS)
def test_only_the_digits_0_to_9_are_a_number(name: str, script: str) -> None:
    assert not is_right(name, NUMBERS[name].format(OTHER_DIGITS[script]))
    assert is_right(name, NUMBERS[name].format("18"))


@pytest.mark.parametrize("name", [name for name in NUMBERS if name != "arithmetic"])
def test_full_width_digits_are_the_same_digits(name: str) -> None:
    assert is_right(name, NUMBERS[name].format("１８"))
    assert not is_right(name, NUMBERS[name].format("１７"))


@pytest.mark.parametrize("name", ["exact", "string_f1", "puzzle", "flan", "search", "search_f1"])
@pytest.mark.parametrize("answer", ["القاهرة", "東京", "Αθήνα", "Köln", "Ko\u0308ln", "Київ", "👩‍👩‍👧", "ירושלים"])
def test_words_of_any_script_are_compared(name: str, answer: str) -> None:
    _, right, _, _ = CASES[name]
    prompt = make_prompt(answer=answer)
    function = find("reward", name)
    assert function(prompt, make_rollout(right.replace("Paris", answer))) == 1.0
    assert function(prompt, make_rollout(right)) == 0.0
