import zlib

from podium.data.arithmetic import arithmetic
from podium.data.sums import sums
from podium.records import Row


def text(row: Row) -> str:
    return row.messages[0]["content"]


def test_a_row_is_a_question_and_its_answer() -> None:
    answers = {text(row): row.answer for row in arithmetic()}
    assert answers["What is 37 + 48?"] == "85"
    assert answers["What is 12 - 97?"] == "-85"
    assert arithmetic()[0].messages[0]["role"] == "user"


def test_the_two_splits_hold_every_problem_once() -> None:
    train = [text(row) for row in arithmetic()]
    held_out = [text(row) for row in arithmetic(split="held_out")]
    assert not set(train) & set(held_out)
    # 90 × 90 pairs of two-digit numbers, two operators
    assert len(set(train) | set(held_out)) == len(train) + len(held_out) == 2 * 90 * 90


def test_the_split_is_a_hash_of_the_problem_and_never_moves() -> None:
    held_out = {text(row) for row in arithmetic(split="held_out")}
    for problem in ("37 + 48", "10 - 10", "99 + 99", "50 - 49"):
        assert (f"What is {problem}?" in held_out) == (zlib.crc32(problem.encode()) % 32 == 0)
    assert text(arithmetic(split="held_out")[0]) == "What is 10 + 38?"
    assert len(held_out) == 508


def test_operations_choose_the_problems_and_neither_their_order_nor_their_number_matters() -> None:
    assert {text(row).split()[3] for row in arithmetic(operations="-")} == {"-"}
    assert arithmetic(operations="-+-") == arithmetic(operations="+-")


def test_sums_are_those_of_arithmetic() -> None:
    assert sums() == arithmetic("+")
    assert sums(split="held_out") == arithmetic("+", split="held_out")
