"""The value of an expression: exact if it is rational, else to many digits. Symbols get random values.

Two expressions are the same if they have the same values at several points. Work is limited: every step costs in
proportion to the size of its numbers, and an expression that costs too much has no value.
"""

import operator
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from math import ceil, comb, factorial, floor, gcd, inf, isqrt, lcm
from typing import Any

import mpmath
from sympy import integer_nthroot

from podium.reward.math_answers.expressions import Node, number

DIGITS = 50
MAX_DIGITS = 3000
ROUGH_DIGITS = 25
LIMIT_DIGITS = 80
PARTIAL_SUMS = [8, 16, 32, 64, 128, 256, 512]
MAX_BITS = 100_000
MAX_ROUNDED_BITS = 10_000
MAX_ROOT_BITS = 900
LARGE_BITS = 80
"""Numbers with more bits than this in their integer part are computed with more digits."""
MAX_WORK = 1_000_000
"""Limit of one comparison, in steps of about a microsecond."""
ROUGH_WORK = 100_000
"""Cost of a numerical method of mpmath, in addition to the values that it asks for."""
MAX_FACTORIAL = 5000
MAX_TERMS = 3000
TRIALS = 6
"""Points at which expressions with symbols are compared; at the last two points symbols may be negative."""
NEGATIVE_TRIALS = 2
ROUNDED_PLACES = 6
"""A decimal with at least this many places may stand for a number that has no finite decimal."""
CONSTANTS = {"pi", "e", "i", "infty"}
BINDING = {"sum", "product", "integral", "limit", "let"}
"""Kinds of nodes whose first part is a variable with a meaning in the last part only."""
DISCRETE = {"sum", "product", "factorial", "binomial", "gcd", "lcm"}
Value = Any  # a Fraction, or a number of mpmath


class NoValue(ArithmeticError):
    """The expression has no value, or its value costs too much."""


class TooCostly(Exception):
    """The comparison has used up its budget."""


ERRORS = (ArithmeticError, ValueError, TypeError, KeyError, RecursionError)
"""What computing a value may raise, in addition to `TooCostly`."""


class Budget:
    """The work that is left for a comparison."""

    def __init__(self) -> None:
        self.left: float = MAX_WORK


BUDGET: ContextVar[Budget] = ContextVar("BUDGET")


@cache
def context(digits: int) -> Any:
    """mpmath with a precision of its own, so that no global state changes."""
    made = mpmath.MPContext()
    made.dps = digits
    return made


class Evaluator:
    """Values of expressions at one point."""

    def __init__(self, values: dict[str, Value], digits: int = DIGITS) -> None:
        self.values = values
        self.results: tuple[Value, ...] = ()
        """The values of the expressions that are compared: see `sample`."""
        self.mp = context(digits)
        self.budget = BUDGET.get(None) or Budget()
        self.is_rough = False
        """Whether a part was computed by quadrature or extrapolation."""
        self.left_reals = False
        """Whether a root or a logarithm of a negative number was computed."""
        self.largest = 0
        """Bits of the integer part of the largest number that was rounded."""

    def __call__(self, node: Node) -> Value:
        self.spend(1)
        if node.kind in OPERATIONS:
            return self.checked(OPERATIONS[node.kind](self, *map(self, node.parts)))
        return self.checked(getattr(self, f"_{node.kind}")(*node.parts))

    def spend(self, work: float) -> None:
        self.budget.left -= work + 1
        if self.budget.left < 0:
            raise TooCostly("too much work")

    def checked(self, value: Value) -> Value:
        if isinstance(value, Fraction):
            bits = value.numerator.bit_length() + value.denominator.bit_length()
            self.spend((bits / 100) ** 1.5)
            if bits > MAX_BITS:
                raise NoValue("too large")
            return value
        self.spend(30 + self.mp.dps / 10)
        if self.mp.isnan(value):
            raise NoValue("not a number")
        if not self.mp.isinf(value) and value:
            self.largest = max(self.largest, int(self.mp.mag(value)))
            if self.largest > MAX_ROUNDED_BITS:
                raise NoValue("too large")
        return value

    def real(self, value: Value) -> Any:
        """The value as a number of mpmath."""
        return self.mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value

    def is_negative(self, value: Any) -> bool:
        return self.mp.im(value) == 0 and self.mp.re(value) < 0

    def integer(self, value: Value) -> int:
        if isinstance(value, Fraction) and value.denominator == 1:
            return int(value)
        raise NoValue("not an integer")

    def both(self, one: Value, other: Value) -> tuple[Value, Value]:
        """Two values that arithmetic can combine: both exact, or both rounded."""
        is_exact = isinstance(one, Fraction) and isinstance(other, Fraction)
        return (one, other) if is_exact else (self.real(one), self.real(other))

    def fold(self, combine: Callable[[Value, Value], Value], start: int, values: Iterable[Value]) -> Value:
        total: Value = Fraction(start)
        for value in values:
            total = self.checked(combine(*self.both(total, value)))
        return total

    @contextmanager
    def roughly(self, digits: int) -> Iterator[Any]:
        """Computes with other digits, by a method that is not exact."""
        before, self.mp, self.is_rough = self.mp, context(digits), True
        try:
            yield self.mp
        finally:
            self.mp = before

    # ---- nodes whose parts are not values

    def _number(self, value: Fraction, _decimals: int | None) -> Value:
        return value

    def _symbol(self, name: str) -> Value:
        if name in self.values:
            return self.values[name]
        return +{"i": self.mp.mpc(0, 1), "pi": self.mp.pi, "e": self.mp.e, "infty": self.mp.inf}[name]

    def bound(self, variable: str, value: Value, body: Node) -> Value:
        before = self.values
        self.values = {**before, variable: value}
        try:
            return self(body)
        finally:
            self.values = before

    def _terms(self, variable: str, low: Node, high: Node, body: Node) -> Iterator[Value]:
        first, last = self.integer(self(low)), self.integer(self(high))
        if last - first > MAX_TERMS:
            raise NoValue("too many terms")
        return (self.bound(variable, Fraction(place), body) for place in range(first, last + 1))

    def _sum(self, variable: str, low: Node, high: Node, body: Node) -> Value:
        if self(high) == self.mp.inf:
            return self._endless_sum(variable, self.integer(self(low)), body)
        return self.fold(operator.add, 0, self._terms(variable, low, high, body))

    def _endless_sum(self, variable: str, first: int, body: Node) -> Value:
        """From a few partial sums, whose errors in 1/n, 1/n², … are eliminated."""
        with self.roughly(LIMIT_DIGITS):
            terms = (
                self.real(self.bound(variable, Fraction(first + place), body)) for place in range(PARTIAL_SUMS[-1])
            )
            totals = [*accumulate(terms)]
            sums = [totals[count - 1] for count in PARTIAL_SUMS]
            if abs(sums[-1] - sums[-2]) > 1e-12 * max(1, abs(sums[-1])):
                last = sums
                for order in range(1, len(sums)):
                    last, sums = sums, [high + (high - low) / (2**order - 1) for low, high in pairwise(sums)]
                sums = [last[-1], sums[-1]]
        if abs(sums[-1] - sums[-2]) > 1e-9 * max(1, abs(sums[-1])):
            raise NoValue("a sum that does not converge")
        return sums[-1]

    def _product(self, variable: str, low: Node, high: Node, body: Node) -> Value:
        return self.fold(operator.mul, 1, self._terms(variable, low, high, body))

    def _integral(self, variable: str, low: Node, high: Node, body: Node) -> Value:
        ends = [self.real(self(low)), self.real(self(high))]
        if self.mp is context(ROUGH_DIGITS):
            raise NoValue("one integral within another")
        self.spend(ROUGH_WORK)
        with self.roughly(ROUGH_DIGITS) as mp:
            return +mp.quad(lambda place: self.real(self.bound(variable, place, body)), ends, maxdegree=6)

    def _limit(self, variable: str, goal: Node, side: str, body: Node) -> Value:
        """The value close to the goal, if it is the same from every side and at two distances."""
        end = self.real(self(goal))
        with self.roughly(LIMIT_DIGITS) as mp:
            if mp.isinf(end):
                places = [mp.mpf(10) ** exponent * (1 if end > 0 else -1) for exponent in (24, 25)]
            else:
                signs = {"+": [1], "-": [-1]}.get(side, [1, -1])
                places = [end + sign * mp.mpf(10) ** -exponent for sign in signs for exponent in (20, 21)]
            values = [self.real(self.bound(variable, place, body)) for place in places]
        if any(abs(value - values[0]) > 1e-9 * max(1, abs(value)) for value in values):
            raise NoValue("no limit")
        return values[-1]

    def _let(self, variable: str, value: Node, body: Node) -> Value:
        return self.bound(variable, self(value), body)


# ---- operations on values


def _over(evaluator: Evaluator, one: Value, other: Value) -> Value:
    one, other = evaluator.both(one, other)
    if other == 0:
        raise NoValue("division by zero")
    return one / other


def _power(evaluator: Evaluator, base: Value, exponent: Value) -> Value:
    if base == 0 and isinstance(exponent, Fraction) and exponent < 0:
        raise NoValue("division by zero")
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            return _exact_power(base, int(exponent))
        evaluator.left_reals |= base < 0
        if (root := _exact_root(base, exponent.denominator)) is not None:
            return _exact_power(root, exponent.numerator)
    mp, base, exponent = evaluator.mp, evaluator.real(base), evaluator.real(exponent)
    if base == 0:
        return base
    evaluator.left_reals |= evaluator.is_negative(base) and exponent != int(mp.re(exponent))
    if abs(exponent * mp.log(abs(base))) > MAX_ROUNDED_BITS:
        raise NoValue("too large")
    return mp.power(base, exponent)


def _exact_power(base: Fraction, exponent: int) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) not in (0, 1) and bits * abs(exponent) > MAX_BITS:
        raise NoValue("too large")
    return base**exponent


def _root(evaluator: Evaluator, value: Value, degree: Value) -> Value:
    """The principal root; an odd root of a negative number is real."""
    if not 0 < evaluator.integer(degree) < 1000:
        raise NoValue("a root of no degree")
    if degree % 2 and evaluator.is_negative(evaluator.real(value)):
        return -_power(evaluator, -value, 1 / degree)
    return _power(evaluator, value, 1 / degree)


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    """The root, if it is rational and quickly found."""
    if value < 0 or (degree > 2 and max(value.numerator, value.denominator).bit_length() > MAX_ROOT_BITS):
        return None
    (top, is_exact), (bottom, too) = (integer_nthroot(part, degree) for part in (value.numerator, value.denominator))
    return Fraction(top, bottom) if is_exact and too else None


def _determinant(evaluator: Evaluator, *cells: Value) -> Value:
    """By the first row; the cells are given row by row."""
    size = isqrt(len(cells))
    if size == 1:
        return cells[0]
    rows = [cells[start : start + size] for start in range(size, len(cells), size)]
    minors = [[cell for row in rows for cell in (*row[:column], *row[column + 1 :])] for column in range(size)]
    terms = [
        operator.mul(*evaluator.both((-1) ** column * cells[column], _determinant(evaluator, *minor)))
        for column, minor in enumerate(minors)
    ]
    return evaluator.fold(operator.add, 0, terms)


def _factorial(evaluator: Evaluator, value: Value) -> Value:
    is_integer = isinstance(value, Fraction) and value.denominator == 1
    if abs(value) > MAX_FACTORIAL or (is_integer and value < 0):
        raise NoValue("too large a factorial")
    if not is_integer:
        return evaluator.mp.gamma(evaluator.real(value) + 1)
    evaluator.spend(int(value) * 4)
    return Fraction(factorial(int(value)))


def _binomial(evaluator: Evaluator, top: Value, bottom: Value) -> Value:
    n, k = evaluator.integer(top), evaluator.integer(bottom)
    if not 0 <= n <= MAX_FACTORIAL or abs(k) > MAX_FACTORIAL:
        raise NoValue("too large a binomial")
    evaluator.spend(4 * n)
    return Fraction(comb(n, k) if k >= 0 else 0)


def _ln(evaluator: Evaluator, value: Value) -> Value:
    value = evaluator.real(value)
    if value == 0:
        raise NoValue("the logarithm of zero")
    evaluator.left_reals |= evaluator.is_negative(value)
    return evaluator.mp.log(value)


def _log(evaluator: Evaluator, value: Value, base: Value = None) -> Value:
    return _ln(evaluator, value) / (evaluator.mp.log(10) if base is None else _ln(evaluator, base))


def _through(name: str, max_real: float = inf, max_size: float = inf) -> Callable[[Evaluator, Any], Any]:
    """A function of mpmath: not real for real numbers above `max_real`, and too large for numbers above `max_size`."""

    def compute(evaluator: Evaluator, value: Value) -> Any:
        value = evaluator.real(value)
        if abs(value) > max_size:
            raise NoValue("too large")
        evaluator.left_reals |= bool(evaluator.mp.im(value) == 0 and abs(value) > max_real)
        return getattr(evaluator.mp, name)(value)

    return compute


def _whole(exact: Callable[[Fraction], int], name: str) -> Callable[[Evaluator, Value], Value]:
    return lambda evaluator, value: Fraction(
        exact(value) if isinstance(value, Fraction) else int(getattr(evaluator.mp, name)(value))
    )


def _integers(function: Callable[..., int]) -> Callable[..., Value]:
    return lambda evaluator, *values: Fraction(function(*map(evaluator.integer, values)))


OPERATIONS: dict[str, Callable[..., Value]] = {
    "group": lambda evaluator, value: value,
    "add": lambda evaluator, *values: evaluator.fold(operator.add, 0, values),
    "minus": lambda evaluator, value: -value,
    "times": lambda evaluator, one, other: operator.mul(*evaluator.both(one, other)),
    "over": _over,
    "power": _power,
    "root": _root,
    "determinant": _determinant,
    "absolute": lambda evaluator, value: abs(value),
    "floor": _whole(floor, "floor"),
    "ceiling": _whole(ceil, "ceil"),
    "degrees": lambda evaluator, value: evaluator.real(value) * evaluator.mp.pi / 180,
    "factorial": _factorial,
    "binomial": _binomial,
    "gcd": _integers(gcd),
    "lcm": _integers(lcm),
    "max": lambda evaluator, *values: max(values, key=evaluator.real),
    "min": lambda evaluator, *values: min(values, key=evaluator.real),
    "log": _log,
    "lg": _log,
    "ln": _ln,
    "cis": lambda evaluator, value: evaluator.mp.expj(evaluator.real(value)),
    "arctan": _through("atan"),
    **{name: _through(name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "tanh", "coth")},
    **{name: _through(name, max_size=MAX_ROUNDED_BITS) for name in ("exp", "sinh", "cosh")},
    **{f"arc{name}": _through(f"a{name}", max_real=1) for name in ("sin", "cos", "cot")},
}
"""Kind of node → its value, from the values of its parts."""


# ---- comparisons


@lru_cache(maxsize=512)
def symbols(node: Node) -> frozenset[str]:
    """The free symbols of an expression."""
    if node.kind == "symbol":
        return frozenset(node.parts) - CONSTANTS
    inner = frozenset[str]().union(*(symbols(part) for part in node.parts if isinstance(part, Node)))
    return inner - {node.parts[0]} if node.kind in BINDING else inner


def is_constant(node: Node) -> bool:
    """Whether the expression has no free symbols."""
    return not symbols(node)


def _counted(node: Node, is_inside: bool = False) -> frozenset[str]:
    """The symbols that must be integers: in factorials and the like, and in exponents of negative numbers."""
    if node.kind == "symbol":
        return frozenset(node.parts) if is_inside else frozenset()
    if node.kind == "power" and _is_negative(node.parts[0]):
        return _counted(node.parts[0]) | _counted(node.parts[1], True)
    is_inside = is_inside or node.kind in DISCRETE
    return frozenset[str]().union(*(_counted(part, is_inside) for part in node.parts if isinstance(part, Node)))


def _is_negative(node: Node) -> bool:
    return node.kind == "minus" or (node.kind == "group" and _is_negative(node.parts[0]))


def _pick(name: str, trial: int, is_integer: bool) -> Fraction:
    seed = zlib.crc32(f"{name} {trial}".encode())
    if is_integer:
        return Fraction((7 if name[0] in "nmNM" else 2) + (seed >> 8) % 5 + trial % 2)
    value = Fraction(101 + (seed >> 8) % 400, 128)
    return -value if trial >= TRIALS - NEGATIVE_TRIALS and seed & 1 else value


def sample(point: dict[str, Fraction], *nodes: Node) -> Evaluator | None:
    """The values at a point as `results`, with enough digits for the largest number; None if there are no values."""
    digits = DIGITS
    try:
        for _ in range(2):
            evaluator = Evaluator(dict(point), digits)
            evaluator.results = tuple(map(evaluator, nodes))
            needed = DIGITS + int(evaluator.largest * 0.302)
            if evaluator.largest <= LARGE_BITS or needed <= digits or needed > MAX_DIGITS or evaluator.is_rough:
                break
            digits = -(-needed // 500) * 500
    except ERRORS:
        return None
    if needed > MAX_DIGITS and not all(isinstance(value, Fraction) for value in evaluator.results):
        return None
    return evaluator


def samples(*nodes: Node) -> Iterator[tuple[dict[str, Fraction], Evaluator]]:
    """The points at which all expressions have values, with these values.

    A point with negative values does not count if it leads to roots or logarithms of negative numbers.
    """
    names = sorted(frozenset[str]().union(*map(symbols, nodes)))
    counted = frozenset[str]().union(*map(_counted, nodes))
    for trial in range(TRIALS if names else 1):
        point = {name: _pick(name, trial, name in counted) for name in names}
        taken = sample(point, *nodes)
        if taken is not None and not (taken.left_reals and any(value < 0 for value in point.values())):
            yield point, taken


def close(one: Value, other: Value, taken: Evaluator) -> bool:
    """Whether two values are equal, to the digits that were computed."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    mp, one, other = taken.mp, taken.real(one), taken.real(other)
    if mp.isinf(one) or mp.isinf(other):
        return one == other
    size = max(abs(one), abs(other))
    tolerance = mp.mpf(10) ** (-8 if taken.is_rough else 20 - mp.dps)
    return abs(one - other) <= tolerance * (max(size, 1) if taken.is_rough else max(size, mp.mpf(10) ** -10))


def same_value(one: Node, other: Node) -> bool:
    """Whether two expressions are equal; a long decimal may be the rounded value of the other expression."""
    if one == other:
        return True
    agreed = 0
    for point, taken in samples(one, other):
        if not close(taken.results[0], taken.results[1], taken):
            return not point and (_is_rounded(one, other) or _is_rounded(other, one))
        agreed += 1
    return agreed >= (2 if symbols(one) | symbols(other) else 1)


def _is_rounded(decimal: Node, exact: Node) -> bool:
    """Whether the first is a decimal of many places that rounds the second, which has no finite decimal."""
    places = _written_places(decimal)
    if places is None or places < ROUNDED_PLACES or _written_places(exact) is not None:
        return False
    taken = sample({}, decimal, exact)
    if taken is None:
        return False
    value = taken.results[1]
    if isinstance(value, Fraction) and pow(10, value.denominator.bit_length(), value.denominator) == 0:
        return False  # a finite decimal
    one, other = map(taken.real, taken.results)
    error, ten = abs(one - other), taken.mp.mpf(10)
    return bool(error < ten**-places and error < abs(other) * ten**-4)


def _written_places(node: Node) -> int | None:
    """The decimal places of a number in digits; None for any other expression."""
    while node.kind in ("minus", "group"):
        node = node.parts[0]
    return node.parts[1] if node.kind == "number" else None


def number_of(node: Node) -> Any:
    """The value of a constant as a real number of mpmath; None if it has none."""
    taken = sample({}, node) if is_constant(node) else None
    if taken is None:
        return None
    value = taken.real(taken.results[0])
    return value.real if abs(value.imag) < 1e-30 else None


def same_equation(one: Node, other: Node, is_ordered: bool = False) -> bool:
    """Whether `left - right` of one equation is a constant multiple of the other's; if ordered, a positive multiple."""
    ratios: list[Value] = []
    for _, taken in samples(one, other):
        above, below = taken.both(*taken.results)
        if below == 0 or above == 0 or abs(below) < 1e-25 or abs(above) < 1e-25:
            return False
        ratios.append(above / below)
        if not close(ratios[0], ratios[-1], taken):
            return False
    return len(ratios) >= 3 and (not is_ordered or bool(ratios[0].real > 0))


def solves(name: str, value: Node, equation: Node) -> bool:
    """Whether `name = value` makes the equation true everywhere, and the equation is linear in the name."""
    if name in symbols(value):
        return False
    steps = [Node("add", (value, number(step))) for step in (0, 1, 2)]
    agreed = 0
    for _, taken in samples(*(Node("let", (name, step, equation)) for step in steps)):
        zero, one, two = taken.results
        if not close(zero, Fraction(0), taken) or not close(two, one + one, taken) or abs(one) < 1e-20:
            return False
        agreed += 1
    return agreed >= 2
