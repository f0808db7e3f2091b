"""Share of a row's cases for which the Python program in the answer prints what is expected, in a sandbox.

The program is the last fenced block of Python. The row's answer is a list of {"input": …, "output": …}. The program
gets the input on its standard input, and its output is compared here, outside the sandbox. White space at the ends of
lines does not count, and numbers are compared as numbers: 1.0 is 1.
"""

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from podium.records import Row
from podium.reward.code import program_in, scores_programs, tests_of
from podium.reward.sandbox import Limits, Sandbox, run_with_inputs
from podium.reward.scoring.verifiers import checks_answer


def check(row: Row) -> None:
    """The row has cases, each with an input and an output."""
    _check(tests_of(row))


def _check(cases: list[Any]) -> None:
    for case in cases:
        if not (isinstance(case, Mapping) and {"input", "output"} <= case.keys()):
            raise ValueError(f'a test must have an "input" and an "output", unlike {case!r:.60}')


@checks_answer(check)
@scores_programs
def code_stdio(text: str, tests: list[Any], limits: Limits, sandbox: Sandbox) -> list[bool] | None:
    """0 without a fenced block. A case fails if the program exits with another code than 0."""
    _check(tests)
    program = program_in(text)
    if program is None:
        return None
    printed = run_with_inputs(program, [_text(case["input"]) for case in tests], limits, sandbox)
    outputs = zip(printed, tests, strict=True)
    return [given is not None and is_same(given, _text(case["output"])) for given, case in outputs]


def is_same(printed: str, expected: str) -> bool:
    """Whether two outputs are the same, line by line and word by word."""
    mine, theirs = ([line.split() for line in text.rstrip().splitlines()] for text in (printed, expected))
    return [*map(len, mine)] == [*map(len, theirs)] and all(
        _is_same_word(one, other)
        for my_line, their_line in zip(mine, theirs, strict=True)
        for one, other in zip(my_line, their_line, strict=True)
    )


def _is_same_word(one: str, other: str) -> bool:
    if one == other:
        return True
    try:
        return Decimal(one) == Decimal(other)
    except InvalidOperation:
        return False


def _text(given: Any) -> str:
    """The text of an input or output; some data sets give a list of lines."""
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)
