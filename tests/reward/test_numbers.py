import pytest

from podium.errors import InputError
from podium.reward._numbers import answer_as_text, expected_integer, last_number, numbers_in


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("none", []),
        ("7", ["7"]),
        ("007", ["7"]),
        ("0", ["0"]),
        ("-0.0", ["0"]),
        ("+7", ["7"]),
        ("-7", ["-7"]),
        ("−7", ["-7"]),
        ("1,234,567.50", ["1234567.5"]),
        ("1,23", ["1", "23"]),
        ("1,2345", ["1", "2345"]),
        ("(3,4)", ["3", "4"]),
        ("10-5", ["10", "5"]),
        ("10 - 5 = 5", ["10", "5", "5"]),
        ("x=-5", ["-5"]),
        ("2024-05-06", ["2024", "5", "6"]),
        ("$5 -$5 $-5 -\\$5 €5 £1,000", ["5", "-5", "-5", "-5", "5", "1000"]),
        (".5 and 0.50", ["0.5", "0.5"]),
        ("it is 18.", ["18"]),
        ("18.00", ["18"]),
        ("18%", ["18"]),
        ("18kg", ["18"]),
        ("١٨ １８", []),  # other digits than 0-9
    ],
)
def test_numbers_have_one_spelling_each(text: str, expected: list[str]) -> None:
    assert list(numbers_in(text)) == expected
    assert last_number(text) == (expected[-1] if expected else None)


@pytest.mark.parametrize(("answer", "text"), [("x", "x"), (18, "18"), (-1.5, "-1.5"), (1e20, "1" + "0" * 20)])
def test_answers_are_texts_or_numbers(answer: object, text: str) -> None:
    assert answer_as_text(answer) == text


@pytest.mark.parametrize("answer", [None, True, ["18"], {"a": 1}])
def test_other_answers_are_refused(answer: object) -> None:
    with pytest.raises(InputError, match="must be a text or a number, not"):
        answer_as_text(answer)


@pytest.mark.parametrize("answer", ["", "none", "1 2", "1.5", 0.5])
def test_an_expected_integer_is_one_and_whole(answer: object) -> None:
    with pytest.raises(InputError, match="must hold one integer, not"):
        expected_integer(answer)
