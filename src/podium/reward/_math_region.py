"""Sets of numbers, compared by which points belong to them: every end, what is between the ends, and beyond."""

from itertools import pairwise
from typing import Any

from podium.reward._math_answer import Region
from podium.reward._math_compare import ERRORS, is_constant, number_of, symbols
from podium.reward._math_number import Node
from podium.reward._math_value import Evaluator, NoValue, context

MAX_ENDS = 60
NEAR = 1e-12
MP = context(50)


def same_region(one: Region, other: Region) -> bool:
    """Whether two sets have the same points."""
    if one.variable and other.variable and one.variable != other.variable:
        return False
    try:
        ends = [*_ends(one), *_ends(other)]
        if len(ends) > MAX_ENDS:
            return False
        return all(_holds(one, point) == _holds(other, point) for point in _probes(ends))
    except ERRORS:
        return False


def _probes(ends: list[Any]) -> list[Any]:
    """The ends, points close to them, points between, and points beyond."""
    finite = sorted({end for end in ends if not MP.isinf(end)})
    if not finite:
        return [MP.mpf(value) for value in (-1000, -1, 0, 1, 1000)]
    between = [(low + high) / 2 for low, high in pairwise(finite)]
    near = [end + step for end in finite for step in (-1e-6, 1e-6)]
    beyond = [finite[0] - step for step in (0.5, 1000)] + [finite[-1] + step for step in (0.5, 1000)]
    return [*finite, *between, *near, *beyond]


def _ends(region: Region) -> list[Any]:
    """Where membership may change, as far as it is written."""
    found: list[Any] = []
    for part in region.parts:
        if isinstance(part, Region):
            found += _ends(part)
        elif isinstance(part, Node):
            found += [number_of(part)] if is_constant(part) else _numbers(part)
    if None in found:
        raise NoValue("an end that is no number")
    return found


def _numbers(node: Node) -> list[Any]:
    """The numbers of an expression, of both signs."""
    if node.kind == "number":
        value = Evaluator({}).real(node.parts[0])
        return [value, -value]
    return [value for part in node.parts if isinstance(part, Node) for value in _numbers(part)]


def _is_near(one: Any, other: Any) -> bool:
    return bool(one == other or abs(one - other) < NEAR)


def _holds(region: Region, point: Any) -> bool:
    """Whether the point belongs to the set."""
    parts: Any = region.parts
    if region.kind == "all":
        return True
    if region.kind == "points":
        return any(_is_near(number_of(part), point) for part in parts)
    if region.kind == "interval":
        low, high, brackets = number_of(parts[0]), number_of(parts[1]), parts[2]
        if low > high:
            raise NoValue("an interval that ends before it begins")
        if _is_near(low, point) or _is_near(high, point):
            at_low = not _is_near(low, point) or brackets[0] == "["
            return at_low and (not _is_near(high, point) or brackets[1] == "]")
        return bool(low < point < high)
    if region.kind == "union":
        return any(_holds(part, point) for part in parts)
    if region.kind == "both":
        return all(_holds(part, point) for part in parts)
    if region.kind == "minus":
        return _holds(parts[0], point) and not _holds(parts[1], point)
    left, relation, right = parts
    return _relates(left, relation, right, point)


def _relates(left: Node, relation: str, right: Node, point: Any) -> bool:
    """Whether an inequality holds at a point."""
    name = next(iter(symbols(left) | symbols(right)))
    evaluator = Evaluator({name: point})
    try:
        one, other = (evaluator.real(evaluator(side)) for side in (left, right))
    except NoValue:
        return False
    if abs(one.imag) > NEAR or abs(other.imag) > NEAR:
        return False
    difference = one.real - other.real
    if abs(difference) < NEAR * max(1, abs(other)):
        return relation in (r"\le", r"\ge")
    if relation == r"\ne":
        return True
    return bool(difference < 0) == (relation in ("<", r"\le"))
