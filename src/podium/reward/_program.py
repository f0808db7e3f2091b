"""What the verifiers of programs share: the program in an answer, the tests in a row, options and score."""

import json
import textwrap
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from podium.errors import InputError
from podium.records import Prompt, Row
from podium.reward._sandbox import Sandbox, refuse_sandbox
from podium.reward._thinking import Thinking

FENCE = "```"

TestTimeout = Annotated[float, Field(gt=0, description="seconds for one test")]
Total = Annotated[float, Field(gt=0, description="seconds for all tests; those not reached by then have failed")]
Memory = Annotated[int, Field(ge=64, description="megabytes that the program may take")]
Threshold = Annotated[
    float, Field(gt=0, le=1, description="share of tests to pass for 1, else 0; by default the share")
]


def last_fenced_block(text: str) -> str | None:
    """The last ```…``` block of an answer, whatever its language is called. One that is cut off is none."""
    last: str | None = None
    block: list[str] | None = None
    for line in text.split("\n"):
        mark = line.strip()
        if block is None and mark.startswith(FENCE) and "`" not in mark.removeprefix(FENCE):
            block = []
        elif block is not None and mark == FENCE:
            last, block = textwrap.dedent("".join(f"{each}\n" for each in block)), None
        elif block is not None:
            block.append(line)
    return last


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
