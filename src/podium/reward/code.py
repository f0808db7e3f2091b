"""Share of a row's assertions that the Python program in the answer passes, in a sandbox.

The program is the last fenced block of Python that defines a name that the tests use. The row's answer is a list of
tests. Each test is Python code that raises if it is not passed, such as `assert add(1, 2) == 3`. The program never sees
the tests, and another process makes every comparison. So the program can neither read what is expected nor pretend to
have passed. What is not about assertions serves `code_stdio` too.
"""

import ast
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Annotated, Any

from pydantic import Field

from podium.errors import InputError
from podium.records import Prompt, Rollout, Row
from podium.reward.sandbox import Limits, Sandbox, judge_asserts, refuse_sandbox
from podium.reward.scoring.verifiers import checks_answer, declare_range, gold_answer, judges_answer, refuses

FENCE = "```"
FENCES = (FENCE, "~~~")
PYTHON = re.compile(r"\W*py(?:thon)?3?\b", re.IGNORECASE)
DEFINITION = re.compile(r"^(?:(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)|(\w+)[ \t]*(?::[^=\n]*)?=(?!=))", re.MULTILINE)

TestTimeout = Annotated[float, Field(gt=0, description="seconds for one test")]
Total = Annotated[float, Field(gt=0, description="seconds for all tests; tests not reached by then have failed")]
Memory = Annotated[int, Field(ge=64, description="megabytes that the program may take")]
SandboxOption = Annotated[Sandbox, Field(description="bubblewrap, or weak: limits without isolation")]
Threshold = Annotated[
    float | None, Field(gt=0, le=1, description="share of tests to pass for 1, else 0; None: the share itself")
]


def scores_programs(verdicts: Callable[[str, list[Any], Limits, Sandbox], list[bool] | None]) -> Callable[..., float]:
    """Decorator: turns verdicts on programs into a reward, the share of tests passed.

    `verdicts(text, tests, limits, sandbox)` says for each test whether the program in the text passes it; None if the
    text has no program, which scores 0.
    """

    @refuses(_refuse)
    @gold_answer(_solution)
    @declare_range(0.0, 1.0)
    @judges_answer
    def reward(
        prompt: Prompt,
        rollout: Rollout,
        *,
        test_timeout_s: TestTimeout = 2.0,
        total_s: Total = 8.0,
        memory_mb: Memory = 1024,
        threshold: Threshold = None,
        sandbox: SandboxOption = "bubblewrap",
    ) -> float:
        passed = verdicts(rollout.text, tests_of(prompt), Limits(test_timeout_s, total_s, memory_mb), sandbox)
        rate = 0.0 if passed is None else sum(passed) / len(passed)
        return rate if threshold is None else float(rate >= threshold)

    reward.__module__, reward.__name__, reward.__doc__ = verdicts.__module__, verdicts.__name__, verdicts.__doc__
    return reward


def _refuse(timeout_s: float, *, total_s: float, sandbox: Sandbox, **_others: Any) -> None:
    """Raises `InputError` before the model loads: for limits that contradict each other, or a missing sandbox."""
    if timeout_s <= total_s:
        raise InputError(
            f"reward.timeout_s = {timeout_s:g} is not above total_s = {total_s:g}: a program that takes too long would "
            "abstain instead of failing; raise the one or lower the other"
        )
    refuse_sandbox(sandbox)


def _solution(prompt: Prompt) -> str | None:
    """The row's `solution` as a fenced answer, which should pass; None if the row has none."""
    solution = prompt.metadata.get("solution")
    if not isinstance(solution, str):
        return None
    return solution if FENCE in solution else f"{FENCE}python\n{solution}\n{FENCE}"


def tests_of(prompt: Prompt | Row) -> list[Any]:
    """The row's answer: a list, or a text that holds a list as JSON."""
    tests = prompt.answer
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            tests = [tests]
    if not isinstance(tests, list) or not tests:
        raise ValueError("the row's answer is not a list of tests")
    return tests


def program_in(text: str, tests: Iterable[str] = ()) -> str | None:
    """The program of an answer: the last fenced block that is marked as Python, else the last block of any kind.

    Blocks that define a name that the tests use come first: an example of how to call the program, or its output, is
    not the program. None without a block.
    """
    used = _names_used(tests)
    found, best = None, (False, False)
    for program, is_python in _fenced_blocks(text):
        rank = any((match[1] or match[2]) in used for match in DEFINITION.finditer(program)), is_python
        if rank >= best:
            found, best = program, rank
    return found


def _fenced_blocks(text: str) -> Iterator[tuple[str, bool]]:
    """The content of each ```…``` and ~~~…~~~ block that is closed, and whether it is marked as Python."""
    fence, language, lines = "", "", list[str]()
    for line in text.split("\n"):
        mark = line.strip()
        if fence and mark == fence:
            yield textwrap.dedent("".join(f"{each}\n" for each in lines)), PYTHON.match(language) is not None
            fence = ""
        elif fence:
            lines.append(line)
        elif mark.startswith(FENCES) and mark[0] not in mark[3:]:
            fence, language, lines = mark[:3], mark[3:], []


def _names_used(tests: Iterable[str]) -> set[str]:
    """The names that the tests use and do not define."""
    used: set[str] = set()
    for test in tests:
        with suppress(SyntaxError, ValueError, RecursionError):
            names = [node for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)]
            used |= {name.id for name in names} - {name.id for name in names if isinstance(name.ctx, ast.Store)}
    return used


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
