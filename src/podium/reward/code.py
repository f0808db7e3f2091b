"""Share of a row's assertions that the Python program in the answer passes, in a sandbox.

The program is the last fenced block of Python that defines a name that the tests use; see `sandbox/programs.py`. The
row's answer is a list of tests. Each test is Python code that raises if it is not passed, such as
`assert add(1, 2) == 3`. The program never sees the tests, and another process makes every comparison. So the program
can neither read what is expected nor pretend to have passed.
"""

from typing import Any

from podium.records import Row
from podium.reward.sandbox.programs import program_in, scores_programs, tests_of
from podium.reward.sandbox.run import Limits, Sandbox, judge_asserts
from podium.reward.scoring.contract import checks_answer


def check(row: Row) -> None:
    """The row has tests, and each is Python."""
    for test in tests_of(row):
        if not isinstance(test, str):
            raise ValueError(f"a test must be a text such as 'assert add(1, 2) == 3', not {test!r:.60}")
        try:
            compile(test, "<test>", "exec")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"the test {test!r:.60} is no Python: {error}") from None


@checks_answer(check)
@scores_programs
def code(text: str, tests: list[Any], limits: Limits, sandbox: Sandbox) -> list[bool] | None:
    """0 without a fenced block."""
    asserts = [str(test) for test in tests]
    program = program_in(text, asserts)
    return None if program is None else judge_asserts(program, asserts, limits, sandbox)
