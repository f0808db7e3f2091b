import threading
import time

import pytest

from podium.errors import InputError
from podium.records import Row
from podium.reward.math import find_answer, last_boxed, math
from podium.reward.math_answers import same_answer
from podium.reward.scoring.stage import declared_range
from podium.reward.strict_math import strict_math
from tests.builders import make_prompt, make_rollout
from tests.reward.math_judged import RIGHT, SECOND_RIGHT, SECOND_WRONG, WRONG
from tests.reward.math_pairs import EQUAL, UNEQUAL

VERDICTS = {True: "right", False: "wrong"}
PAIRS = {
    f"{kind}, {VERDICTS[verdict]}": [(given, expected, verdict) for given, expected in pairs]
    for verdict, table in ((True, EQUAL), (False, UNEQUAL))
    for kind, pairs in table.items()
}
JUDGED = {
    f"{kind}, {VERDICTS[verdict]}": [(text, label, verdict) for label, text in pairs]
    for verdict, table in ((True, {**RIGHT, "second": SECOND_RIGHT}), (False, {**WRONG, "second": SECOND_WRONG}))
    for kind, pairs in table.items()
}


def score(text: str, answer: object) -> float:
    return math(make_prompt(answer=answer), make_rollout(text))


def test_there_are_pairs_enough() -> None:
    assert sum(map(len, PAIRS.values())) >= 200
    assert sum(map(len, JUDGED.values())) >= 950
    assert sum(map(len, UNEQUAL.values())) >= 80


@pytest.mark.parametrize("kind", PAIRS)
def test_pairs_judged_by_hand(kind: str) -> None:
    misjudged = [
        (given, expected)
        for given, expected, verdict in PAIRS[kind]
        if same_answer(given, expected) is not verdict or score(rf"So it is $\boxed{{{given}}}$.", expected) != verdict
    ]
    assert misjudged == []


@pytest.mark.parametrize("kind", JUDGED)
def test_whole_answers_judged_by_hand(kind: str) -> None:
    assert [(text, label) for text, label, verdict in JUDGED[kind] if score(text, label) != verdict] == []


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (r"So $x = \boxed{\frac{1}{2}}$.", "0.5", 1),
        (r"\boxed{1} no, \boxed{2}", "2", 1),
        (r"\boxed{1} no, \boxed{2}", "1", 0),
        (r"\boxed{5} and \boxed{6", "5", 1),  # the second one is not closed
        (r"\boxed{\boxed{5}}", "5", 1),
        (r"\fbox{5}", "5", 1),
        (r"\boxed {5}", "5", 1),
        (r"\boxed{\text{the set } \{1,2\}}", r"\text{the set } \{1, 2\}", 1),
        (r"The answer is 6. \boxed{5}", "6", 0),  # the box counts
        ("The answer is 5.", "5", 1),
        ("The answer is 5. I hope it is correct.", "5", 1),
        ("The final answer is: **5**", "5", 1),
        ("Answer: 5", "5", 1),
        ("the ANSWER IS $5$ because 6", "5", 1),
        ("The answer is therefore $x = 5$ apples.", "5", 1),
        ("The answer is:\n$$\\frac{1}{2}$$\nand done", "1/2", 1),
        (r"The answer is \(0.5\).", "1/2", 1),
        ("The answer is 3.5 cm.", "3.5", 1),
        ("The answer is 4. No, the answer is 5.", "5", 1),
        ("The answer is 4. No, the answer is 5.", "4", 0),
        ("The answer is unknown, but 5", "5", 0),
        ("so $x = 4$ and then $5$", "5", 1),
        ("so $x = 4$ and then $5$", "4", 0),
        ("it costs \\$4, so $y=5$", "5", 1),
        ("it costs $4\nso \\(y=5\\)", "5", 1),
        ("so \\[5\\]", "5", 1),
        ("5", "5", 1),
        ("1/2", "0.5", 1),
        ("I think it is 5", "5", 0),  # a sentence is no answer
        ("", "5", 0),
        (r"\boxed{}", "5", 0),
        (r"\boxed{ }", "5", 0),
        (r"\boxed{5}", 5, 1),
        (r"\boxed{0.5}", 0.5, 1),
        (r"\boxed{5}", r"We get $\boxed{5}$.", 1),
    ],
)
def test_the_answer_is_found_in_the_text(text: str, answer: object, expected: float) -> None:
    assert score(text, answer) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{5}", 1),
        (r"so $\boxed{5.0}$", 1),
        (r"\boxed{6} or \boxed{x = 5}", 1),
        (r"\boxed{6}", 0),
        (r"\boxed{5} or \boxed{6}", 0),
        ("The answer is 5.", 0),
        ("$5$", 0),
        ("5", 0),
        (r"\boxed{5", 0),
        (r"\boxed5", 1),
        (r"\boxed 5", 1),
        (r"so $\boxed 5$.", 1),
        (r"\boxed \frac{10}{2}.", 1),
        (r"\boxed{5}, which stands in a \boxed as it should", 1),
        (r"\boxed{4}, \boxed{5}", 0),  # a list
        (r"\boxed{4} and \boxed{5}", 0),
        ("", 0),
    ],
)
def test_strict_math_takes_a_box_and_nothing_else(text: str, expected: float) -> None:
    assert strict_math(make_prompt(answer="5"), make_rollout(text)) == expected


def test_escaped_braces_belong_to_the_answer() -> None:
    assert last_boxed(r"\boxed{\{1,2\}} \}") == r"\{1,2\}"
    assert last_boxed(r"\boxed{\frac{1}{2}} {") == r"\frac{1}{2}"
    assert last_boxed(r"} \boxed{a\\} b") == r"a\\"


def test_an_answer_that_is_too_long_is_none() -> None:
    assert find_answer("\\boxed{" + "1+" * 499 + "1}") is not None
    assert find_answer("\\boxed{" + "1+" * 500 + "1}") is None


def test_it_works_off_the_main_thread() -> None:
    """math-verify's own limits would raise there, and its callers have scored everything 0 by that."""
    values: list[float] = []
    thread = threading.Thread(target=lambda: values.append(score(r"\boxed{\sqrt{18}}", r"3\sqrt{2}")))
    thread.start()
    thread.join(timeout=60)
    assert values == [1.0]


@pytest.mark.parametrize("tower", ["10^{10^{10}}", "3^(3^(3^(3)))", r"x^{\frac{3^{3^{3^3}}}{2}}"])
def test_a_power_of_a_power_never_goes_to_sympy(tower: str) -> None:
    """math-verify decides about notation that Podium does not read, and would compute the other answer without end."""
    started = time.process_time()
    assert not same_answer(r"\frac{\partial f}{\partial x}", tower)
    assert time.process_time() - started < 5


@pytest.mark.parametrize("answer", [None, "", " ", "$$", r"\boxed{}", ["5"], True, "1" * 1001])
def test_an_answer_that_cannot_be_compared_is_refused(answer: object) -> None:
    with pytest.raises(InputError, match=r"must have 1 to 1000 characters|must be a text or a number"):
        math.check_answer(Row.from_text("?", answer=answer))


def test_their_ranges_are_declared() -> None:
    assert declared_range(math) == declared_range(strict_math) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("text", "label", "expected"),
    [
        ("### Final Answer\n\n5", "5", 1),
        ("So 5.\n\n**Answer**\n6\n", "5", 0),
        ("## Answer\n\nFirst $x = 6$.\n\nThen $y = 5$.", "5", 1),  # a heading over more than the answer
        ("<answer>5</answer>", "5", 1),
        ("<answer>The answer is 6</answer> or 5", "5", 0),
        ("Between <answer></answer> the answer is 5.", "5", 1),
        ("答案是5。", "5", 1),
        ("故答案为：5", "5", 1),
        ("答案是6。不是5", "5", 0),
        ("The correct option is **B**.", "B", 1),
        ("The correct option is not B.", "B", 0),
        ("The correct option is **C**, not B.", "B", 0),
        (r"\framebox{5}", "5", 1),
        (r"\framebox{6}", "5", 0),
        (r"\boxed{５}", "5", 1),
        (r"\boxed{５６}", "5", 0),
        (r"\boxed{8\pi\text{ units}^2}", r"8\pi", 1),
        (r"\boxed{8\pi\text{ units}^2}", r"64\pi", 0),
        (r"\boxed{5\text{ units}^2}", "25", 0),
        (r"\boxed{C_5^2}", r"\binom52", 1),
        (r"\boxed{C_{5}^{3}+1}", r"\binom52", 0),
        (r"\boxed{x = 2k\pi, k \in \mathbb{Z}}", r"2k\pi, k\in\mathbb{Z}", 1),
        (r"\boxed{x = 2k\pi\ (k \in \mathbb{Z})}", r"2k\pi, k\in\mathbb{Z}", 1),
        (r"\boxed{n=4k}", r"n=4k, k\in\mathbb{Z}", 1),
        (r"\boxed{x = k\pi, k \in \mathbb{Z}}", r"2k\pi, k\in\mathbb{Z}", 0),
        (r"\boxed{x = 2k\pi, k \in \mathbb{N}}", r"2k\pi, k\in\mathbb{Z}", 0),
        (r"\boxed{n=4k, k\in\mathbb{Z}}", r"n=4k, k\in\mathbb{Z}^+", 0),
        (r"\boxed{[3, \infty)}", r"x \ge 3, x\in\mathbb{Z}", 0),
        (r"\boxed{2, k\in\mathbb{Z}}", "2", 0),  # k stands nowhere in the answer
    ],
)
def test_answers_as_models_write_them(text: str, label: str, expected: float) -> None:
    assert math(make_prompt(answer=label), make_rollout(text)) == expected


@pytest.mark.parametrize("text", ["answer\n", "#" * 9, "答案是", "answer \n " * 3, "<answer>", "option is "])
def test_many_marks_of_an_answer_take_no_time(text: str) -> None:
    started = time.process_time()
    find_answer(text * (200_000 // len(text)))
    assert time.process_time() - started < 5
