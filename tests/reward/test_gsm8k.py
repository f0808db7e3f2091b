import json
import os
from pathlib import Path

import pytest

from podium.errors import InputError
from podium.records import Row
from podium.reward.gsm8k import gsm8k
from podium.reward.scoring.stage import declared_range
from tests.builders import make_prompt, make_rollout
from tests.reward.math_judged import GSM8K_RIGHT, GSM8K_WRONG

DATA = Path(os.environ.get("PODIUM_GSM8K", Path(__file__).parents[3] / "shared" / "data" / "gsm8k"))


def score(text: str, answer: object = "18") -> float:
    return gsm8k(make_prompt(answer=answer), make_rollout(text))


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("18", "18", 1),
        ("She makes 9 * 2 = $18 every day.\n#### 18", "18", 1),
        ("The answer is 18.", 18, 1),
        ("It is **18** dollars", "18", 1),
        ("\\boxed{18}", "18", 1),
        ("18.00", "18", 1),
        ("$18", "18", 1),
        ("18 eggs", "18", 1),
        ("18%", "18", 1),
        ("1,200", "1200", 1),
        ("1200", "1,200", 1),
        ("109,200,000 grams", "#### 109,200,000", 1),
        ("so -7", "-7", 1),
        ("it is −7", "-7", 1),
        ("0.5", ".50", 1),
        ("18", "2 * 9 = <<2*9=18>>18\n#### 18", 1),
        ("18", "$18", 1),
        ("18", 18.0, 1),
        ("18", "#### 18 (2 of 9)", 1),  # the number right after the marker
        ("18", "2 of 9 are 18", 1),  # without a marker the last one
        ("17, no: 18", "18", 1),
        ("a profit of $1.5 million", "1500000", 1),
        (r"-2.25 \text{ thousand}", "-2250", 1),
        ("It takes 12 million steps", "12", 1),  # if the question is how many millions
        # wrong
        ("18, no: 17", "18", 0),
        ("", "18", 0),
        ("eighteen", "18", 0),
        ("180", "18", 0),
        ("18.5", "18", 0),
        ("-18", "18", 0),
        ("7", "-7", 0),
        ("10-7", "-7", 0),
        ("18 for 2 days", "18", 0),
        ("12 million", "1200000", 0),
        ("12 millionaires", "12000000", 0),
        ("1,800", "18", 0),
        ("1, 800", "1800", 0),
        ("١٨", "18", 0),
        ("18", "18 is 2 * 9 \n#### 19", 0),
    ],
)
def test_the_last_number_is_compared(text: str, answer: object, expected: float) -> None:
    assert score(text, answer) == expected


@pytest.mark.parametrize(("label", "text"), GSM8K_RIGHT)
def test_right_answers_judged_by_hand(label: str, text: str) -> None:
    assert score(text, label) == 1


@pytest.mark.parametrize(("label", "text"), GSM8K_WRONG)
def test_wrong_answers_judged_by_hand(label: str, text: str) -> None:
    assert score(text, label) == 0


@pytest.mark.parametrize(
    "answer", ["12:30", "10^6", "5-10", "(3,4)", "#### 3:4", "1.5/2", "1.5 million", "#### 12 dozen"]
)
def test_an_answer_of_several_numbers_is_refused(answer: str) -> None:
    with pytest.raises(InputError, match="is not a single number in digits; give one such as"):
        gsm8k.check_answer(Row.from_text("?", answer=answer))


def test_numbers_that_no_integer_should_be_made_of_are_compared_too() -> None:
    assert score("9" * 10_000, "9" * 10_000) == 1
    assert score("9" * 10_000, "9" * 9_999) == 0


@pytest.mark.parametrize("answer", [None, "", "no number", "18 is right\n#### none", True, [18], float("nan")])
def test_an_answer_without_a_number_is_refused(answer: object) -> None:
    with pytest.raises(InputError, match=r"no number in the answer|must be a text or a number"):
        gsm8k.check_answer(Row.from_text("?", answer=answer))


def test_its_range_is_declared() -> None:
    assert declared_range(gsm8k) == (0.0, 1.0)


def gold_answers() -> list[str]:
    if not (DATA / "train.jsonl").is_file():
        pytest.skip(f"GSM8K is not in {DATA}; set PODIUM_GSM8K to the folder of its train.jsonl and test.jsonl")
    lines = [line for name in ("train", "test") for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
    return [json.loads(line)["answer"] for line in lines]


def test_every_gold_answer_of_gsm8k_scores_1_and_every_other_answer_0() -> None:
    answers = gold_answers()
    assert len(answers) == 8792
    values = [int(answer.rpartition("####")[2].replace(",", "")) for answer in answers]
    others = answers[1:] + answers[:1]
    for answer, value, other, other_value in zip(answers, values, others, values[1:] + values[:1], strict=True):
        gsm8k.check_answer(Row.from_text("?", answer=answer))
        assert score(answer, answer) == 1
        assert score(f"It is {value:,}.", answer) == 1
        assert score(f"It is ${value}.00", answer) == 1
        assert score(other, answer) == float(other_value == value)


def test_an_exponent_or_an_index_is_not_the_answer() -> None:
    for text in ("5 m^2", "5 cm^{2}", r"5\text{ m}^2", "m^2", "x_2"):
        assert gsm8k(make_prompt(answer="2"), make_rollout(text)) == 0
    assert gsm8k(make_prompt(answer="5"), make_rollout("It covers 5 m^2.")) == 1
    assert gsm8k(make_prompt(answer="5 cm^2"), make_rollout("5")) == 1
    assert gsm8k(make_prompt(answer="-5"), make_rollout("The change is - 5")) == 1
    assert gsm8k(make_prompt(answer="3"), make_rollout("３")) == 1
    assert gsm8k(make_prompt(answer="1500000"), make_rollout("１.５ million")) == 1
