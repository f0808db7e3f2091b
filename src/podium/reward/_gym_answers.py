"""Where a task of `reasoning-gym` would pay for an answer that is not right, and what is asked of an answer instead.

Every offered task was tried with constant answers. Three paid on all rows: `puzzle24` for any four numbers that make
24, `coin_flip` for the first digit of a probability, and `complex_arithmetic` for what is no number.
"""

import ast
import cmath
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

MEMORY_MB = 512
"""What scoring one answer may take on top of what the process has."""
MAX_PUZZLE_CHARACTERS = 200


def is_acceptable(task: str, answer: str, entry: dict[str, Any]) -> bool:
    """Whether the answer may go to the task's scorer at all; any other one counts as unanswered."""
    return not _is_no_number(answer) and DEMANDS.get(task, lambda *_: True)(answer, entry)


@contextmanager
def little_memory() -> Iterator[None]:
    """A `MemoryError` where scoring takes much: some scorers write out what an answer only names, as U999999999."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limits = [limit for limit in (soft, hard, used + (MEMORY_MB << 20)) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _is_no_number(answer: str) -> bool:
    try:
        return cmath.isnan(complex(re.sub(r"\s", "", answer).lower().replace("nani", "nanj")))
    except ValueError:
        return False


def _makes_24(answer: str, entry: dict[str, Any]) -> bool:
    """The numbers of the row, each once, and exactly 24."""
    used = sorted(int(number) for number in re.findall(r"[0-9]+", answer[:MAX_PUZZLE_CHARACTERS]))
    if len(answer) > MAX_PUZZLE_CHARACTERS or used != sorted(entry["metadata"]["numbers"]):
        return False
    try:
        return _value(ast.parse(answer.strip(), mode="eval").body) == 24
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return False


def _value(node: ast.expr) -> Fraction:
    """Of whole numbers, + - * / and brackets."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        return -_value(node.operand) if isinstance(node.op, ast.USub) else _value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not an expression of the four operations")


OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: Fraction.__add__,
    ast.Sub: Fraction.__sub__,
    ast.Mult: Fraction.__mul__,
    ast.Div: Fraction.__truediv__,
}


PROBABILITY = re.compile(r"[+-]?[0-9]{0,9}(\.[0-9]{0,40})?([eE][+-]?[0-9]{1,3})?|[0-9]{1,40}/[0-9]{1,40}")


def _is_near(answer: str, entry: dict[str, Any]) -> bool:
    """The probability to four places, as a decimal or a fraction; the scorer would pay for its first digits too."""
    written = answer.replace(",", "").strip()
    if not PROBABILITY.fullmatch(written):  # also what would take long to work out, such as 1e9999999
        return False
    try:
        return abs(float(Fraction(written)) - float(Fraction(entry["answer"]))) <= 1e-4
    except (ValueError, ZeroDivisionError, OverflowError):
        return False


DEMANDS: dict[str, Callable[[str, dict[str, Any]], bool]] = {"puzzle24": _makes_24, "coin_flip": _is_near}
