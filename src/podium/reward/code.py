"""Share of a row's assertions that the Python program in the answer passes, in a sandbox.

The program is the last fenced block of Python that defines a name that the tests use; see `_program.program_in`. The
row's answer is a list of tests, each a piece of Python that raises if it is not passed, such as
`assert add(1, 2) == 3`. The program never sees them, and every comparison is made in another process, so it can neither
read what is expected nor pretend to have passed.
"""

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
from podium.reward._sandbox import Limits, Sandbox, judge_asserts
from podium.reward._thinking import judges_answer


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
@refuses(refuse_program)
@gold_answer(solution_of)
@declare_range(0.0, 1.0)
@judges_answer
def code(
    prompt: Prompt,
    rollout: Rollout,
    *,
    test_timeout_s: TestTimeout = 2.0,
    total_s: Total = 8.0,
    memory_mb: Memory = 1024,
    threshold: Threshold | None = None,
    sandbox: Sandbox = "bubblewrap",
) -> float:
    """0 without a fenced block."""
    tests = [str(test) for test in tests_of(prompt)]
    program = program_in(rollout.text, tests)
    if program is None:
        return 0.0
    return pass_rate(judge_asserts(program, tests, Limits(test_timeout_s, total_s, memory_mb), sandbox), threshold)
