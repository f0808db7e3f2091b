import pytest

from podium.errors import InputError
from podium.records import Row
from podium.reward.answer_tag import answer_tag
from podium.reward.scoring.stage import declared_range
from tests.builders import make_prompt, make_rollout


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("<answer>18</answer>", "18", 1),
        ("so <answer> 18 </answer> it is 19", 18, 1),
        ("<answer>\n$18 a day\n</answer>", "18", 1),
        ("<answer>1,200</answer>", "1200", 1),
        ("<answer>-7</answer>", -7, 1),
        ("<answer>18.0</answer>", "18", 1),
        ("<ANSWER>18</Answer>", "18", 1),
        ("<answer>17</answer> no, <answer>18</answer>", "18", 1),
        ("<answer>17 <answer>18</answer>", "18", 1),
        ("<answer>18</answer> or <answer>17", "18", 1),  # the second block is not closed
        ("<answer>18</answer> 17</answer>", "18", 1),  # the second end has no beginning
        ("<answer>18</answer>", "Nine and nine.\n<answer>18</answer>", 1),
        ("18", "18", 0),
        ("", "18", 0),
        ("<answer></answer>", "18", 0),
        ("<answer>eighteen</answer>", "18", 0),
        ("<answer>18", "18", 0),
        ("18</answer>", "18", 0),
        ("</answer>18<answer>", "18", 0),
        ("<answer>18</answer> no, <answer>17</answer>", "18", 0),
        ("<answer>17 or 18</answer>", "18", 0),
        ("<answer>36/2</answer>", "18", 0),
        ("<answer>18/18</answer>", "1", 0),
        ("<answer>18{,}000</answer>", "18000", 1),
        ("<answer>18 000</answer>", "18000", 1),
        ("<answer>18 000</answer>", "0", 0),
        ("<answer>–18</answer>", "-18", 1),
        ("<answer>–18</answer>", "18", 0),
        ("<answer>9 + 9 = 18</answer>", "18", 0),
        ("<answer>18.5</answer>", "18", 0),
        ("<answer>180</answer>", "18", 0),
        ("<answer>１８</answer>", "18", 1),
        ("<answer >18</answer>", "18", 0),
    ],
)
def test_the_integer_of_the_last_block_is_compared(text: str, answer: object, expected: float) -> None:
    assert answer_tag(make_prompt(answer=answer), make_rollout(text)) == expected


@pytest.mark.parametrize("answer", [None, "", "eighteen", "17 or 18", 1.5, [18], "<answer>none</answer> 18"])
def test_an_answer_that_is_no_integer_is_refused(answer: object) -> None:
    with pytest.raises(InputError, match=r"must hold one integer|must be a text or a number"):
        answer_tag.check_answer(Row.from_text("?", answer=answer))


def test_its_range_is_declared() -> None:
    assert declared_range(answer_tag) == (0.0, 1.0)
