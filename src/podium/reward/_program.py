"""What the verifiers of programs share: the program in an answer, the tests in a row, options and score."""

import ast
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from podium.errors import InputError
from podium.records import Prompt, Row
from podium.reward._sandbox import Sandbox, refuse_sandbox
from podium.reward._thinking import Thinking

FENCE = "```"
FENCES = (FENCE, "~~~")
PYTHON = re.compile(r"\W*py(?:thon)?3?\b", re.IGNORECASE)
DEFINITION = re.compile(r"^(?:(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)|(\w+)[ \t]*(?::[^=\n]*)?=(?!=))", re.MULTILINE)

TestTimeout = Annotated[float, Field(gt=0, description="seconds for one test")]
Total = Annotated[float, Field(gt=0, description="seconds for all tests; those not reached by then have failed")]
Memory = Annotated[int, Field(ge=64, description="megabytes that the program may take")]
Threshold = Annotated[
    float, Field(gt=0, le=1, description="share of tests to pass for 1, else 0; by default the share")
]


def program_in(text: str, tests: Iterable[str] = ()) -> str | None:
    """The program of an answer: of its fenced blocks that hold Python the last, or the last of any kind.

    A block that defines a name that the tests use comes before one that does not: an example of how to call the
    program, or what it prints, is not the program. None without a block.
    """
    used = _names_used(tests)
    block = max(
        _fenced_blocks(text), key=lambda block: (_defines(block, used), block.is_python, block.place), default=None
    )
    return block and block.content


class _Block(NamedTuple):
    content: str
    is_python: bool
    place: int


def _fenced_blocks(text: str) -> Iterator[_Block]:
    """Each ```…``` and ~~~…~~~ block. One that is cut off is none."""
    fence, language, lines = "", "", list[str]()
    for place, line in enumerate(text.split("\n")):
        mark = line.strip()
        if fence and mark == fence:
            content = textwrap.dedent("".join(f"{each}\n" for each in lines))
            yield _Block(content, PYTHON.match(language) is not None, place)
            fence = ""
        elif fence:
            lines.append(line)
        elif mark.startswith(FENCES) and mark[0] not in mark[3:]:
            fence, language, lines = mark[:3], mark[3:], []


def _names_used(tests: Iterable[str]) -> set[str]:
    """The names that the tests take from elsewhere."""
    used: set[str] = set()
    for test in tests:
        with suppress(SyntaxError, ValueError, RecursionError):
            names = [node for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)]
            used |= {name.id for name in names} - {name.id for name in names if isinstance(name.ctx, ast.Store)}
    return used


def _defines(block: _Block, names: set[str]) -> bool:
    return any((match[1] or match[2]) in names for match in DEFINITION.finditer(block.content))


def solution_of(prompt: Prompt) -> str | None:
    """The row's `solution`, as an answer that should pass; fenced already or not."""
    solution = prompt.metadata.get("solution")
    if not isinstance(solution, str):
        return None
    return solution if FENCE in solution else f"{FENCE}python\n{solution}\n{FENCE}"


def tests_of(prompt: Prompt | Row) -> list[Any]:
    """The row's answer: a list, or a text that holds one as JSON."""
    tests = prompt.answer
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            tests = [tests]
    if not isinstance(tests, list) or not tests:
        raise ValueError("the row's answer is not a list of tests")
    return tests


def pass_rate(passed: Sequence[bool], threshold: float | None) -> float:
    rate = sum(passed) / len(passed)
    return rate if threshold is None else float(rate >= threshold)


def refuse_program(
    timeout_s: float,
    *,
    test_timeout_s: float,
    total_s: float,
    memory_mb: int,
    threshold: float | None,
    sandbox: Sandbox,
    thinking: Thinking = "ignore",
) -> None:
    """Before the model loads: limits that contradict each other, a sandbox that is not there."""
    if timeout_s <= total_s:
        raise InputError(
            f"reward.timeout_s = {timeout_s:g} is not above total_s = {total_s:g}: a program that takes too long would "
            "abstain instead of failing; raise the one or lower the other"
        )
    refuse_sandbox(sandbox)
