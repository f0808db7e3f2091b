"""Whether two expressions have one value, at every point that is tried; whether two equations say the same."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from podium.reward._math_number import Node
from podium.reward._math_value import CONSTANTS, DIGITS, Evaluator, NoValue, Value, context

TRIALS = 6
"""Points at which expressions with symbols are compared; the last two are negative where they can be."""
NEGATIVE_TRIALS = 2
LARGE_BITS = 80
MAX_DIGITS = 3000
ROUNDED_PLACES = 6
"""From so many decimal places on, a decimal may stand for a number that has no finite decimal."""
BINDING = {"sum", "product", "integral", "limit"}
DISCRETE = {"sum", "product", "factorial", "binomial", "gcd", "lcm"}
ERRORS = (NoValue, ArithmeticError, ValueError, TypeError, KeyError, RecursionError)


@lru_cache(maxsize=512)
def symbols(node: Node) -> frozenset[str]:
    """The free symbols of an expression."""
    if node.kind == "symbol":
        return frozenset(node.parts) - CONSTANTS
    inner = frozenset[str]().union(*(symbols(part) for part in node.parts if isinstance(part, Node)))
    return inner - {node.parts[0]} if node.kind in BINDING else inner


def _counted(node: Node, is_inside: bool = False) -> frozenset[str]:
    """The symbols that stand for integers: in factorials and the like, and as exponents of negative numbers."""
    if node.kind == "symbol":
        return frozenset(node.parts) if is_inside else frozenset()
    if node.kind == "power" and _is_negative(node.parts[0]):
        return _counted(node.parts[0]) | _counted(node.parts[1], True)
    is_inside = is_inside or node.kind in DISCRETE
    return frozenset[str]().union(*(_counted(part, is_inside) for part in node.parts if isinstance(part, Node)))


def _is_negative(node: Node) -> bool:
    return node.kind == "minus" or (node.kind == "group" and _is_negative(node.parts[0]))


def points(*nodes: Node) -> Iterator[dict[str, Fraction]]:
    """Values for the symbols of the expressions: as many points as are tried."""
    names = sorted(frozenset[str]().union(*map(symbols, nodes)))
    counted = frozenset[str]().union(*map(_counted, nodes))
    for trial in range(TRIALS if names else 1):
        yield {name: _pick(name, trial, name in counted) for name in names}


def _pick(name: str, trial: int, is_integer: bool) -> Fraction:
    seed = zlib.crc32(f"{name} {trial}".encode())
    if is_integer:
        return Fraction((7 if name[0] in "nmNM" else 2) + (seed >> 8) % 5 + trial % 2)
    value = Fraction(101 + (seed >> 8) % 400, 128)
    return -value if trial >= TRIALS - NEGATIVE_TRIALS and seed & 1 else value


@dataclass(frozen=True)
class Sample:
    """The values of some expressions at a point."""

    values: tuple[Value, ...]
    is_rough: bool
    left_reals: bool
    digits: int


def sample(point: dict[str, Fraction], *nodes: Node) -> Sample | None:
    """The values at a point, with digits enough for the largest number in them; None where there are none."""
    digits = DIGITS
    try:
        for _ in range(2):
            evaluator = Evaluator(dict(point), digits)
            values = tuple(map(evaluator, nodes))
            needed = DIGITS + int(evaluator.largest * 0.302)
            if evaluator.largest <= LARGE_BITS or needed <= digits or needed > MAX_DIGITS or evaluator.is_rough:
                break
            digits = -(-needed // 500) * 500
    except ERRORS:
        return None
    if needed > MAX_DIGITS and not all(isinstance(value, Fraction) for value in values):
        return None
    return Sample(values, evaluator.is_rough, evaluator.left_reals, digits)


def close(one: Value, other: Value, taken: Sample) -> bool:
    """Whether two values are one, as far as they were computed."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    mp = context(taken.digits)
    one, other = (mp.mpf(v.numerator) / v.denominator if isinstance(v, Fraction) else v for v in (one, other))
    if mp.isinf(one) or mp.isinf(other):
        return one == other
    size = max(abs(one), abs(other))
    tolerance = mp.mpf(10) ** (-8 if taken.is_rough else 20 - taken.digits)
    return abs(one - other) <= tolerance * (max(size, 1) if taken.is_rough else max(size, mp.mpf(10) ** -10))


def same_value(one: Node, other: Node) -> bool:
    """Whether two expressions are equal; a long decimal may be the rounded value of the other one."""
    if one == other:
        return True
    agreed = 0
    for point in points(one, other):
        taken = sample(point, one, other)
        if taken is None or (taken.left_reals and any(value < 0 for value in point.values())):
            continue
        if not close(taken.values[0], taken.values[1], taken):
            return not point and (_is_rounded(one, other) or _is_rounded(other, one))
        agreed += 1
    return agreed >= (2 if symbols(one) | symbols(other) else 1)


def _is_rounded(decimal: Node, exact: Node) -> bool:
    """Whether the one is written as a decimal of many places and the other one has no finite decimal."""
    places = written_places(decimal)
    if places is None or places < ROUNDED_PLACES or written_places(exact) is not None:
        return False
    taken = sample({}, decimal, exact)
    if taken is None or any(isinstance(value, Fraction) and _is_finite(value) for value in taken.values[1:]):
        return False
    mp = context(taken.digits)
    one, other = (mp.mpf(v.numerator) / v.denominator if isinstance(v, Fraction) else v for v in taken.values)
    error = abs(one - other)
    return bool(error < mp.mpf(10) ** -places and error < abs(other) * mp.mpf(10) ** -4)


def written_places(node: Node) -> int | None:
    """The decimal places of a number that is written out; None for any other expression."""
    while node.kind in ("minus", "group"):
        node = node.parts[0]
    return node.parts[1] if node.kind == "number" else None


def _is_finite(value: Fraction) -> bool:
    """Whether its decimal ends."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def is_constant(node: Node) -> bool:
    """Whether it has no free symbols."""
    return not symbols(node)


def number_of(node: Node) -> Any:
    """The value of a constant as a real number of mpmath, or None."""
    taken = sample({}, node) if is_constant(node) else None
    if taken is None:
        return None
    value = Evaluator({}).real(taken.values[0])
    return value.real if abs(value.imag) < 1e-30 else None


def same_equation(one: Node, other: Node, is_ordered: bool = False) -> bool:
    """Whether `left - right` of one equation is a constant multiple of the other's, a positive one if ordered."""
    ratios: list[tuple[Value, Sample]] = []
    for point in points(one, other):
        taken = sample(point, one, other)
        if taken is None or (taken.left_reals and any(value < 0 for value in point.values())):
            continue
        above, below = taken.values
        if not (isinstance(above, Fraction) and isinstance(below, Fraction)):
            above, below = (Evaluator({}, taken.digits).real(value) for value in taken.values)
        if below == 0 or above == 0 or abs(below) < 1e-25 or abs(above) < 1e-25:
            return False
        ratios.append((above / below, taken))
    if len(ratios) < 3 or not all(close(ratio, ratios[0][0], taken) for ratio, taken in ratios):
        return False
    return not is_ordered or bool(ratios[0][0].real > 0)


def solves(name: str, value: Node, equation: Node) -> bool:
    """Whether `name = value` makes the equation true everywhere, and the equation is linear in the name."""
    agreed = 0
    for point in points(value, equation):
        taken = sample(point, value)
        if taken is None or taken.left_reals or name in symbols(value):
            continue
        right = taken.values[0]
        try:
            at = [Evaluator({**point, name: right + step}, taken.digits)(equation) for step in (0, 1, 2)]
        except ERRORS:
            continue
        if any(isinstance(each, Fraction) is not isinstance(at[0], Fraction) for each in at):
            continue
        if not close(at[0], at[0] - at[0], taken) or not close(at[2], at[1] + at[1], taken) or abs(at[1]) < 1e-20:
            return False
        agreed += 1
    return agreed >= 2
