"""The value of an expression: exact where it is rational, else to many digits; symbols get values at random.

Two expressions are the same where their values are at several points. Work is bounded: every step is paid for by the
size of its numbers, and what costs too much has no value.
"""

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from fractions import Fraction
from functools import cache
from itertools import pairwise
from math import ceil, comb, factorial, floor, gcd, isqrt, lcm
from typing import Any

import mpmath

from podium.reward._math_number import Node, number

DIGITS = 50
ROUGH_DIGITS = 25
LIMIT_DIGITS = 80
MOST_TERMS = 512
MAX_BITS = 100_000
MAX_ROUNDED_BITS = 10_000
MAX_WORK = 1_000_000
"""For a comparison as a whole, in steps of about a microsecond."""
ROUGH_WORK = 100_000
"""What a numerical method of mpmath is charged, beside the values that it asks for."""
MAX_FACTORIAL = 5000
MAX_TERMS = 3000
Value = Any  # a Fraction, or a number of mpmath
CONSTANTS = {"pi", "e", "i", "infty"}


class NoValue(ArithmeticError):
    """The expression has no value, or one that costs too much."""


class TooCostly(NoValue):
    """The comparison has used up its work."""


class Budget:
    """Work that is left."""

    def __init__(self) -> None:
        self.left: float = MAX_WORK


BUDGET: ContextVar[Budget] = ContextVar("BUDGET")


@cache
def context(digits: int) -> Any:
    """Arithmetic of its own for a precision, so that nothing global changes."""
    made = mpmath.MPContext()
    made.dps = digits
    return made


class Evaluator:
    """Values of expressions at one point."""

    def __init__(self, values: dict[str, Value], digits: int = DIGITS) -> None:
        self.values = values
        self.mp = context(digits)
        self.budget = BUDGET.get(None) or Budget()
        self.is_rough = False
        """Whether a part was computed by quadrature or extrapolation."""
        self.left_reals = False
        """Whether a root or a logarithm of a negative number was met."""
        self.largest = 0
        """Bits before the point of the largest number that was rounded."""

    def __call__(self, node: Node) -> Value:
        self.spend(1)
        if node.kind in FUNCTIONS:
            return self.checked(FUNCTIONS[node.kind](self, self.real(self(node.parts[0]))))
        value = getattr(self, f"_{node.kind}", _none)(*node.parts)
        return self.checked(value)

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
        else:
            self.spend(30 + self.mp.dps / 10)
            if self.mp.isnan(value):
                raise NoValue("not a number")
            if not self.mp.isinf(value) and value:
                self.largest = max(self.largest, int(self.mp.mag(value)))
                if self.largest > MAX_ROUNDED_BITS:
                    raise NoValue("too large")
        return value

    def real(self, value: Value) -> Any:
        """As a number of mpmath."""
        return self.mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value

    def integer(self, value: Value) -> int:
        if isinstance(value, Fraction) and value.denominator == 1:
            return int(value)
        raise NoValue("not an integer")

    # ---- the kinds of nodes

    def _number(self, value: Fraction, _decimals: int | None) -> Value:
        return value

    def _symbol(self, name: str) -> Value:
        if name in self.values:
            return self.values[name]
        if name == "i":
            return self.mp.mpc(0, 1)
        return +{"pi": self.mp.pi, "e": self.mp.e, "infty": self.mp.inf}[name]

    def _group(self, inner: Node) -> Value:
        return self(inner)

    def _minus(self, inner: Node) -> Value:
        return -self(inner)

    def _degrees(self, inner: Node) -> Value:
        return self.real(self(inner)) * self.mp.pi / 180

    def both(self, left: Node, right: Node) -> tuple[Value, Value]:
        one, other = self(left), self(right)
        if isinstance(one, Fraction) and isinstance(other, Fraction):
            return one, other
        return self.real(one), self.real(other)

    def _add(self, *terms: Node) -> Value:
        total: Value = Fraction(0)
        for value in map(self, terms):
            exact = isinstance(value, Fraction) and isinstance(total, Fraction)
            total = self.checked(total + value if exact else self.real(total) + self.real(value))
        return total

    def _times(self, left: Node, right: Node) -> Value:
        one, other = self.both(left, right)
        return one * other

    def _over(self, left: Node, right: Node) -> Value:
        one, other = self.both(left, right)
        if other == 0:
            raise NoValue("division by zero")
        return one / other

    def _power(self, left: Node, right: Node) -> Value:
        base, exponent = self(left), self(right)
        if base == 0 and isinstance(exponent, Fraction) and exponent < 0:
            raise NoValue("division by zero")
        if isinstance(exponent, Fraction) and exponent.denominator == 1 and isinstance(base, Fraction):
            return _exact_power(base, int(exponent))
        if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator <= 64:
            if base < 0:
                self.left_reals = True
            if (root := _exact_root(base, exponent.denominator)) is not None:
                return self._power(number(root), number(exponent.numerator))
        base, exponent = self.real(base), self.real(exponent)
        if base == 0:
            return base
        if self.mp.im(base) == 0 and self.mp.re(base) < 0 and exponent != int(self.mp.re(exponent)):
            self.left_reals = True
        if abs(exponent * self.mp.log(abs(base))) > MAX_ROUNDED_BITS:
            raise NoValue("too large")
        return self.mp.power(base, exponent)

    def _root(self, inner: Node, index: Node) -> Value:
        degree, value = self(index), self(inner)
        if not isinstance(degree, Fraction) or degree.denominator != 1 or not 0 < degree < 1000:
            raise NoValue("a root of no degree")
        if isinstance(value, Fraction) and (root := _exact_root(value, int(degree))) is not None:
            return root
        value = self.real(value)
        if self.mp.im(value) == 0 and self.mp.re(value) < 0:
            if degree % 2:
                return -self.mp.root(-value, int(degree))
            self.left_reals = True
        return self.mp.root(value, int(degree))

    def _absolute(self, inner: Node) -> Value:
        return abs(self(inner))

    def _floor(self, inner: Node) -> Value:
        value = self(inner)
        return Fraction(floor(value if isinstance(value, Fraction) else int(self.mp.floor(value))))

    def _ceiling(self, inner: Node) -> Value:
        value = self(inner)
        return Fraction(ceil(value if isinstance(value, Fraction) else int(self.mp.ceil(value))))

    def _factorial(self, inner: Node) -> Value:
        value = self(inner)
        if isinstance(value, Fraction) and value.denominator == 1:
            if not 0 <= value <= MAX_FACTORIAL:
                raise NoValue("too large a factorial")
            self.spend(int(value) * 4)
            return Fraction(factorial(int(value)))
        if abs(value) > MAX_FACTORIAL:
            raise NoValue("too large a factorial")
        return self.mp.gamma(self.real(value) + 1)

    def _binomial(self, top: Node, bottom: Node) -> Value:
        n, k = self.integer(self(top)), self.integer(self(bottom))
        if not 0 <= n <= MAX_FACTORIAL or abs(k) > MAX_FACTORIAL:
            raise NoValue("too large a binomial")
        self.spend(4 * n)
        return Fraction(comb(n, k) if k >= 0 else 0)

    def _integers(self, function: Callable[..., int], items: tuple[Node, ...]) -> Value:
        return Fraction(function(*(self.integer(self(item)) for item in items)))

    def _gcd(self, *items: Node) -> Value:
        return self._integers(gcd, items)

    def _lcm(self, *items: Node) -> Value:
        return self._integers(lcm, items)

    def _max(self, *items: Node) -> Value:
        return max((self(item) for item in items), key=self.real)

    def _min(self, *items: Node) -> Value:
        return min((self(item) for item in items), key=self.real)

    def _log(self, inner: Node, base: Node | None = None) -> Value:
        value = self._ln(inner)
        return value / (self._ln(base) if base else self.mp.log(10))

    def _lg(self, inner: Node, base: Node | None = None) -> Value:
        return self._log(inner, base)

    def _ln(self, inner: Node) -> Value:
        value = self.real(self(inner))
        if value == 0:
            raise NoValue("the logarithm of zero")
        if self.mp.im(value) == 0 and self.mp.re(value) < 0:
            self.left_reals = True
        return self.mp.log(value)

    # ---- sums, integrals and limits

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
        total: Value = Fraction(0)
        for term in self._terms(variable, low, high, body):
            exact = isinstance(term, Fraction) and isinstance(total, Fraction)
            total = self.checked(total + term if exact else self.real(total) + self.real(term))
        return total

    def _endless_sum(self, variable: str, first: int, body: Node) -> Value:
        """By partial sums of 8, 16, … 512 terms, whose errors in 1/n, 1/n², … are eliminated."""
        before, self.mp, self.is_rough = self.mp, context(LIMIT_DIGITS), True
        try:
            total, sums = self.mp.mpf(0), []
            for count in range(1, MOST_TERMS + 1):
                total += self.real(self.bound(variable, Fraction(first + count - 1), body))
                if count >= 8 and count & (count - 1) == 0:
                    sums.append(total)
            if abs(sums[-1] - sums[-2]) > 1e-12 * max(1, abs(sums[-1])):
                last = sums
                for order in range(1, len(sums)):
                    last, sums = sums, [high + (high - low) / (2**order - 1) for low, high in pairwise(sums)]
                sums = [last[-1], sums[-1]]
        finally:
            self.mp = before
        if abs(sums[-1] - sums[-2]) > 1e-9 * max(1, abs(sums[-1])):
            raise NoValue("a sum that does not converge")
        return sums[-1]

    def _product(self, variable: str, low: Node, high: Node, body: Node) -> Value:
        total: Value = Fraction(1)
        for term in self._terms(variable, low, high, body):
            exact = isinstance(term, Fraction) and isinstance(total, Fraction)
            total = self.checked(total * term if exact else self.real(total) * self.real(term))
        return total

    def _integral(self, variable: str, low: Node, high: Node, body: Node) -> Value:
        ends = [self.real(self(low)), self.real(self(high))]
        mp = context(ROUGH_DIGITS)
        if self.mp is mp:
            raise NoValue("one integral within another")
        self.spend(ROUGH_WORK)
        before, self.mp, self.is_rough = self.mp, mp, True
        try:
            return +mp.quad(lambda place: self.real(self.bound(variable, place, body)), ends, maxdegree=6)
        finally:
            self.mp = before

    def _limit(self, variable: str, goal: Node, side: str, body: Node) -> Value:
        """The value close to the goal, if it is one and the same from every side and at two distances."""
        end = self.real(self(goal))
        before, self.mp, self.is_rough = self.mp, context(LIMIT_DIGITS), True
        try:
            if self.mp.isinf(end):
                places = [self.mp.mpf(10) ** exponent * (1 if end > 0 else -1) for exponent in (24, 25)]
            else:
                signs = {"+": [1], "-": [-1]}.get(side, [1, -1])
                places = [end + sign * self.mp.mpf(10) ** -exponent for sign in signs for exponent in (20, 21)]
            values = [self.real(self.bound(variable, place, body)) for place in places]
        finally:
            self.mp = before
        if any(abs(value - values[0]) > 1e-9 * max(1, abs(value)) for value in values):
            raise NoValue("no limit")
        return values[-1]

    def _determinant(self, *cells: Node) -> Value:
        size = isqrt(len(cells))
        if size == 1:
            return self(cells[0])
        total = number(0)
        for column, cell in enumerate(cells[:size]):
            rest = [each for place, each in enumerate(cells) if place >= size and place % size != column]
            term = Node("times", (cell, Node("determinant", tuple(rest))))
            total = Node("add", (total, Node("minus", (term,)) if column % 2 else term))
        return self(total)


def _none(*_: Any) -> Value:
    raise NoValue("not an operation")


def _exact_power(base: Fraction, exponent: int) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) not in (0, 1) and bits * abs(exponent) > MAX_BITS:
        raise NoValue("too large")
    return base**exponent if abs(base) != 1 else base ** (exponent % 2)


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    """The rational root of a number that has one."""
    if value < 0:
        return None
    tops = [_integer_root(part, degree) for part in (value.numerator, value.denominator)]
    return None if None in tops else Fraction(tops[0] or 0, tops[1] or 1)


def _integer_root(value: int, degree: int) -> int | None:
    if degree == 2:
        root = isqrt(value)
    elif value.bit_length() < 900:
        root = round(value ** (1 / degree))
    else:
        return None
    return root if root**degree == value else None


def _through(name: str) -> Callable[[Evaluator, Any], Any]:
    return lambda evaluator, value: getattr(evaluator.mp, name)(value)


def _inverse_of(name: str) -> Callable[[Evaluator, Any], Any]:
    def compute(evaluator: Evaluator, value: Any) -> Any:
        if evaluator.mp.im(value) == 0 and name != "atan" and abs(value) > 1:
            evaluator.left_reals = True
        return getattr(evaluator.mp, name)(value)

    return compute


def _exponential(evaluator: Evaluator, value: Any) -> Any:
    if abs(value) > MAX_ROUNDED_BITS:
        raise NoValue("too large")
    return evaluator.mp.exp(value)


FUNCTIONS: dict[str, Callable[[Evaluator, Any], Any]] = {
    **{name: _through(name) for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
    **{name: _through(name) for name in ("tanh", "coth")},
    "sinh": lambda evaluator, value: (_exponential(evaluator, value) - _exponential(evaluator, -value)) / 2,
    "cosh": lambda evaluator, value: (_exponential(evaluator, value) + _exponential(evaluator, -value)) / 2,
    "exp": _exponential,
    "cis": lambda evaluator, value: evaluator.mp.exp(evaluator.mp.mpc(0, 1) * value),
    "arcsin": _inverse_of("asin"),
    "arccos": _inverse_of("acos"),
    "arctan": _inverse_of("atan"),
    "arccot": _inverse_of("acot"),
}
