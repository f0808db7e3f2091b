import pytest

from podium.errors import InputError
from podium.reward.scoring.verifiers import answer_as_text, expected_integer, last_readings, numbers_in


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
        ("18{,}000 18\\,000 18'000", ["18000", "18000", "18000"]),
        ("18 000", ["18000"]),
        ("18\u00a0000", ["18000"]),
        ("18\u202f000.50", ["18000.5"]),
        ("1 234 567", ["1234567"]),
        ("2024 150", ["2024", "150"]),
        ("12 0000", ["12", "0"]),
        ("–18", ["-18"]),
        ("10–15", ["10", "15"]),
        ("7/8", ["0.875"]),
        ("-1/3", ["-1/3"]),
        ("2/6", ["1/3"]),
        (r"\frac{7}{8} \dfrac12", ["0.875", "0.5"]),
        ("3 1/2", ["3.5"]),
        (r"-3\frac{1}{2}", ["-3.5"]),
        ("3 5/2", ["3", "2.5"]),
        ("5/10/2024", ["5", "10", "2024"]),
        ("1/0", ["1/0"]),
        ("١٨ １８", ["18"]),  # other digits than 0-9, and 0-9 in full width
        ("－１，２００．５", ["-1200.5"]),
        ("5 m^2", ["5"]),
        ("5 m²", ["5"]),
        ("5 cm^{2}", ["5"]),
        (r"5\text{ cm}^2", ["5"]),
        ("5 m s^{-1} or 5 m s^-1", ["5", "5"]),
        ("x_2 = 7, x_{12} = 8", ["7", "8"]),
        ("10^6 10^{6}", ["10", "6", "10", "6"]),  # of a number, not of a letter
        (r"\frac{1}{2}^2", ["0.5", "2"]),
        ("– 5", ["-5"]),
        (" **- $5.50**", ["-5.5"]),
        ("x = - 5", ["-5"]),
        ("The answer is − 5.", ["-5"]),
        ("x = $- 5$", ["-5"]),
        ("this - 5", ["5"]),
        ("- 5 apples\n- 3 pears", ["5", "3"]),  # a list
        ("10 = 15 - 5", ["10", "15", "5"]),
    ],
)
def test_numbers_have_one_spelling_each(text: str, expected: list[str]) -> None:
    assert list(numbers_in(text)) == expected
    assert last_readings(text)[:1] == expected[-1:]


@pytest.mark.parametrize(("answer", "text"), [("x", "x"), (18, "18"), (-1.5, "-1.5"), (1e20, "1" + "0" * 20)])
def test_answers_are_texts_or_numbers(answer: object, text: str) -> None:
    assert answer_as_text(answer) == text


@pytest.mark.parametrize("answer", [None, True, ["18"], {"a": 1}])
def test_other_answers_are_refused(answer: object) -> None:
    with pytest.raises(InputError, match="must be a text or a number, not"):
        answer_as_text(answer)


@pytest.mark.parametrize("answer", ["", "none", "1 2", "1.5", 0.5, "7/8", "36/2"])
def test_an_expected_integer_is_one_and_whole(answer: object) -> None:
    with pytest.raises(InputError, match="must hold one integer, not"):
        expected_integer(answer)
