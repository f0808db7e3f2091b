"""Share of a row's cases for which the Python program in the answer prints what is expected, in a sandbox.

The program is the last fenced block of Python; see `_program.program_in`. The row's answer is a list of
{"input": …, "output": …}; the program gets the input on its standard input, what it prints is compared here, outside
the sandbox. White space at the ends of lines does not count, and numbers are compared as numbers: 1.0 is 1.
"""

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from podium.records import Prompt, Rollout, Row
from podium.reward._contract import checks_answer, declare_range, gold_answer, refuses
from podium.reward._program import (
    Memory,
    TestTimeout,
    Threshold,
    Total,
    pass_rate,
    program_in,
    refuse_program,
    solution_of,
    tests_of,
)
from podium.reward._sandbox import Limits, Sandbox, run_with_inputs
from podium.reward._thinking import judges_answer


def check(row: Row) -> None:
    """The row has cases, each with an input and an output."""
    for case in tests_of(row):
        if not (isinstance(case, Mapping) and {"input", "output"} <= case.keys()):
            raise ValueError(f'a test must have an "input" and an "output", unlike {case!r:.60}')


@checks_answer(check)
@refuses(refuse_program)
@gold_answer(solution_of)
@declare_range(0.0, 1.0)
@judges_answer
def code_stdio(
    prompt: Prompt,
    rollout: Rollout,
    *,
    test_timeout_s: TestTimeout = 2.0,
    total_s: Total = 8.0,
    memory_mb: Memory = 1024,
    threshold: Threshold | None = None,
    sandbox: Sandbox = "bubblewrap",
) -> float:
    """0 without a fenced block. A case whose program exits with another code than 0 is not passed."""
    cases = tests_of(prompt)
    if not all(isinstance(case, Mapping) and {"input", "output"} <= case.keys() for case in cases):
        raise ValueError('each test of the row must have an "input" and an "output"')
    program = program_in(rollout.text)
    if program is None:
        return 0.0
    limits = Limits(test_timeout_s, total_s, memory_mb)
    printed = run_with_inputs(program, [_text(case["input"]) for case in cases], limits, sandbox)
    outputs = zip(printed, cases, strict=True)
    return pass_rate([text is not None and is_same(text, _text(case["output"])) for text, case in outputs], threshold)


def is_same(printed: str, expected: str) -> bool:
    """Line by line and word by word."""
    mine, theirs = _words(printed), _words(expected)
    return len(mine) == len(theirs) and all(
        len(one) == len(other) and all(map(_is_same_word, one, other)) for one, other in zip(mine, theirs, strict=True)
    )


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.rstrip().splitlines()]


def _is_same_word(one: str, other: str) -> bool:
    if one == other:
        return True
    try:
        return Decimal(one) == Decimal(other)
    except InvalidOperation:
        return False


def _text(given: Any) -> str:
    """Some data sets give the lines as a list."""
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)
