"""Whether two mathematical answers are the same: by their text, else by the kind of answer each is.

A missing unit does not count against an answer; a different unit does. math-verify decides about notation that is not
read here. No comparison can take long: `values.py` and `MAX_CHARACTERS` below bound the work.
"""

import logging
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from podium.reward.math_answers.expressions import Node, difference, number, read_expressions
from podium.reward.math_answers.readings import (
    Amount,
    Answer,
    Clock,
    Congruence,
    Equation,
    Inequality,
    Items,
    Region,
    Words,
    as_region,
    readings,
)
from podium.reward.math_answers.spelling import FUNCTIONS, normal, squeezed
from podium.reward.math_answers.units import CURRENCIES, Unit
from podium.reward.math_answers.values import (
    BUDGET,
    ERRORS,
    Budget,
    Evaluator,
    NoValue,
    TooCostly,
    context,
    is_constant,
    number_of,
    same_equation,
    same_value,
    solves,
    symbols,
)

CHOICE = re.compile(r"\(\s*([A-Z])\s*\)\s*(.*)|([A-Z])\s*(?:\)|[.:](?=\s|$))\s*(.*)", re.DOTALL)


def same_answer(given: str, expected: str) -> bool:
    """Whether the given answer is the expected one."""
    mine, wanted = normal(given), normal(expected)
    if not mine or not wanted:
        return False
    if squeezed(mine) == squeezed(wanted):
        return True
    token = BUDGET.set(Budget())
    try:
        return _is_same(mine, wanted)
    except (TooCostly, RecursionError):
        return False
    finally:
        BUDGET.reset(token)


def _is_same(mine: str, wanted: str) -> bool:
    """Whether two answers in normal spelling are the same."""
    chosen = _by_choice(mine, wanted)
    if chosen is not None:
        return chosen
    mine_read, wanted_read = _alone(readings(mine)), _alone(readings(wanted))
    if _any_same(mine_read, wanted_read):
        return True
    is_unread = any(isinstance(side[0], Words) and "\\" in side[0].source for side in (mine_read, wanted_read))
    return is_unread and verified(mine, wanted)  # a notation that was not read, and more than words


def _alone(found: tuple[Answer, ...]) -> list[Answer]:
    """The readings, with the only answer of each set or list that has a single one."""
    several = [each.items for each in found if isinstance(each, Items) and each.kind in ("set", "list")]
    distinct = [_distinct(_values(list(items))) for items in several]
    return [*found, *(items[0] for items in distinct if len(items) == 1)]


def _by_choice(mine: str, wanted: str) -> bool | None:
    """The verdict if the expected answer is a choice, else None; `(B) 12` is `B`, and `12` is `(B) 12`."""
    given, label = _choice(mine), _choice(wanted)
    if label is None:
        return None
    letter, content = label
    if given is not None:
        return given[0].upper() == letter.upper()
    if not content:
        return False if letter.isupper() and len(mine) > 1 and not re.search("[=]", mine) else None
    return _any_same(readings(mine), readings(normal(content)))


def _choice(text: str) -> tuple[str, str] | None:
    """The letter of a choice and the text after it."""
    plain = re.sub("[⟪⟫]", " ", text).strip(" .{}")
    if re.fullmatch(r"\(?\s*[A-Za-z]\s*\)?", plain):
        return re.sub("[^A-Za-z]", "", plain), ""
    if match := CHOICE.fullmatch(plain):
        return match[1] or match[3], (match[2] or match[4] or "").strip()
    return None


def _any_same(mine: Iterable[Answer], wanted: Iterable[Answer]) -> bool:
    return any(_same(one, other) for one, other in product(mine, wanted))


def _same(one: Answer, other: Answer) -> bool:
    """Whether the answer `one` is the expected answer `other`."""
    if isinstance(one, Equation) or isinstance(other, Equation):
        return _same_equations(one, other)
    if isinstance(one, Amount) and isinstance(other, Amount):
        return _same_amount(one, other)
    if isinstance(one, Words) and isinstance(other, Words):
        return bool(one.text) and one.text == other.text
    if isinstance(one, Clock) and isinstance(other, Clock):
        return bool(one.minutes & other.minutes)
    if isinstance(one, Congruence):
        return _same_congruence(one, other)
    if isinstance(one, Inequality) and isinstance(other, Inequality):
        return one.is_strict == other.is_strict and same_equation(one.below, other.below, is_ordered=True)
    if isinstance(one, Region) or isinstance(other, Region):
        mine, wanted = as_region(one), as_region(other)
        return mine is not None and wanted is not None and same_region(mine, wanted)
    return _same_items(one, other)


# ---- amounts


def _same_amount(one: Amount, other: Amount) -> bool:
    return any(_same_quantity(one, mine, other, wanted) for mine in one.units for wanted in other.units)


def _same_quantity(one: Amount, mine: Unit | None, other: Amount, wanted: Unit | None) -> bool:
    if mine is None or wanted is None:
        if one.needs_unit or other.needs_unit:
            return False
        if same_value(one.value, other.value):
            # 17 may lack only the sign of 17 %, but 0.17 % is not 0.17.
            size = number_of(one.value) if mine is not None and mine.name == "percent" else None
            if size is None or abs(size) > 1:
                return True
        bare, measured, unit = (one.value, other.value, wanted) if mine is None else (other.value, one.value, mine)
        return unit is not None and unit.name in ("percent", "angle") and same_value(bare, _in_base(measured, unit))
    if mine.things or wanted.things:
        is_same = mine.things <= wanted.things or wanted.things <= mine.things
        return is_same and bool(mine.things and wanted.things) and same_value(one.value, other.value)
    if mine == wanted:
        return same_value(one.value, other.value)
    if mine.dimensions == wanted.dimensions or {mine.name, wanted.name} == {"angle", "radian"}:
        return same_value(_in_base(one.value, mine), _in_base(other.value, wanted))
    money = [unit.name in CURRENCIES.values() for unit in (mine, wanted)]
    is_part = mine.dimensions <= wanted.dimensions or wanted.dimensions <= mine.dimensions
    return any(money) and is_part and same_value(one.value, other.value)  # $5 an hour is $5


def _in_base(value: Node, unit: Unit) -> Node:
    """In base units: a percentage as a share, an angle in radians."""
    scaled = Node("times", (value, number(unit.size)))
    return Node("degrees", (scaled,)) if unit.name == "angle" else scaled


def _same_congruence(one: Congruence, other: Answer) -> bool:
    """Residues are compared by the modulus; a label that is a bare number means that number."""
    if not isinstance(other, Congruence):
        return _same(one.residues, other)
    if not same_value(one.modulus, other.modulus):
        return False
    if one.name and other.name and one.name != other.name:
        return False
    mine, wanted = _members(one.residues), _members(other.residues)
    return len(mine) == len(wanted) and _matched(
        mine, wanted, lambda left, right: _is_multiple(left, right, one.modulus)
    )


def _is_multiple(left: Answer, right: Answer, modulus: Node) -> bool:
    if not isinstance(left, Amount) or not isinstance(right, Amount):
        return False
    multiple = Node("over", (difference(left.value, right.value), modulus))
    return same_value(multiple, Node("floor", (multiple,)))


# ---- several


def _members(answer: Answer) -> list[Answer]:
    return list(answer.items) if isinstance(answer, Items) else [answer]


def _matched(mine: list[Answer], wanted: list[Answer], same: Callable[[Answer, Answer], bool] = _same) -> bool:
    """Whether each of one list has its own partner in the other."""
    left = list(wanted)
    for each in mine:
        partner = next((place for place, other in enumerate(left) if same(each, other)), None)
        if partner is None:
            return False
        del left[partner]
    return not left


def _same_items(one: Answer, other: Answer) -> bool:
    if not (isinstance(one, Items) and isinstance(other, Items)):
        return False
    is_same = _by_names(one, other)
    if is_same is not None:
        return is_same
    kinds, mine, wanted = {one.kind, other.kind}, list(one.items), list(other.items)
    if len(kinds) > 1 and kinds & {"ratio", "matrix", "column"} and not kinds <= {"column", "()", "⟨⟩"}:
        return False
    if kinds <= {"list", "set"}:
        mine, wanted = _values(mine), _values(wanted)
        if "set" in kinds:
            mine, wanted = _distinct(mine), _distinct(wanted)
        return len(mine) == len(wanted) and _matched(mine, wanted)
    if "set" in kinds or len(mine) != len(wanted):
        return False
    if len(kinds) > 1 and len(mine) == 2 and kinds & {"[]", "(]", "[)"}:
        return False
    return all(map(_same, mine, wanted))


def _distinct(items: list[Answer]) -> list[Answer]:
    found: list[Answer] = []
    for each in items:
        if not _any_same([each], found):
            found.append(each)
    return found


def _values(items: list[Answer]) -> list[Answer]:
    """The values of equations with the same name in front: `x = 2`, `x = 3` are 2 and 3."""
    names = {each.name for each in items if isinstance(each, Equation)} - {""}
    if len(names) > 1:
        return items
    return [each.values[0] if isinstance(each, Equation) and each.name else each for each in items]


def _by_names(one: Items, other: Items) -> bool | None:
    """Whether `x = 2, y = 3` is the same as another such list or as the point (2, 3); None if neither is one."""
    mine, wanted = (_names(each) if each.kind == "list" else {} for each in (one, other))
    if mine and wanted:
        return mine.keys() == wanted.keys() and all(_same(mine[key], wanted[key]) for key in mine)
    names, point = (mine, other) if mine else (wanted, one)
    if not names or point.kind in ("set", "ratio", "matrix", "column"):
        return None
    values, items = [names[key] for key in sorted(names)], list(point.items)
    if len(values) != len(items):
        return False
    return _matched(values, items) if point.kind == "list" else all(map(_same, values, items))


def _names(items: Items) -> dict[str, Answer]:
    names = {each.name: each.values[0] for each in items.items if isinstance(each, Equation) and each.name}
    return names if len(names) == len(items.items) > 1 else {}


# ---- equations


def _same_equations(one: Answer, other: Answer) -> bool:
    if not isinstance(other, Equation):
        assert isinstance(one, Equation)
        return _is_consistent(one) and _gives_a_value(one) and _any_same(one.values, [other])
    if not isinstance(one, Equation):
        return bool(other.name or _is_identity(other)) and _any_same([one], other.values)
    names = one.name, other.name
    if all(names) and (one.name == other.name or all(map(_is_of_a_function, names))):
        return _is_consistent(one) and _any_same(one.values, other.values)
    return _same_curve(one, other)


def _is_of_a_function(name: str) -> bool:
    return name == "y" or re.fullmatch(r"[fgh]\([a-z]\)", name) is not None


def _is_identity(equation: Equation) -> bool:
    nodes = read_expressions(equation.sides)
    return nodes is not None and all(same_value(nodes[0], each) for each in nodes[1:])


def _is_consistent(equation: Equation) -> bool:
    """Whether each constant side between the first and the last equals the last side."""
    between = [readings(side)[0] for side in equation.sides[1:-1]]
    constants = [each for each in between if isinstance(each, Amount) and is_constant(each.value)]
    return all(_any_same([each], equation.values) for each in constants)


def _gives_a_value(equation: Equation) -> bool:
    """Whether an equation gives a value: a name or letters in front of it, or sides that are equal."""
    if equation.name or _is_identity(equation):
        return True
    first, last = readings(equation.sides[0])[0], equation.values[0]
    return (
        isinstance(first, Amount)
        and not is_constant(first.value)
        and not (isinstance(last, Amount) and not is_constant(last.value))
    )


def _same_curve(one: Equation, other: Equation) -> bool:
    """Whether one equation is a multiple of the other, or solves it for a name."""
    mine, wanted = read_expressions(one.sides), read_expressions(other.sides)
    if mine is None or wanted is None or len(mine) != 2 or len(wanted) != 2:
        return False
    first, second = difference(*mine), difference(*wanted)
    return same_equation(first, second) or any(
        name in symbols(curve) and not is_constant(value) and solves(name, value, curve)
        for name, value, curve in ((one.name, mine[1], second), (other.name, wanted[1], first))
    )


MAX_ENDS = 60
NEAR = 1e-20
MP = context(50)


def same_region(one: Region, other: Region) -> bool:
    """Whether two sets have the same points."""
    if one.variable and other.variable and one.variable != other.variable:
        return False
    try:
        ends = [*_ends(one), *_ends(other)]
        return len(ends) <= MAX_ENDS and all(_holds(one, point) == _holds(other, point) for point in _probes(ends))
    except ERRORS:
        return False


def _probes(ends: list[Any]) -> list[Any]:
    """Points to test: the ends, and points close to them, between them and beyond them."""
    finite = sorted({end for end in ends if not MP.isinf(end)})
    if not finite:
        return [MP.mpf(value) for value in (-1000, -1, 0, 1, 1000)]
    between = [(low + high) / 2 for low, high in pairwise(finite)]
    near = [end + step for end in finite for step in (-1e-6, 1e-6)]
    beyond = [finite[0] - step for step in (0.5, 1000)] + [finite[-1] + step for step in (0.5, 1000)]
    return [*finite, *between, *near, *beyond]


def _ends(region: Region) -> list[Any]:
    """The numbers at which membership may change, as far as they are written."""
    found: list[Any] = []
    for part in region.parts:
        if isinstance(part, Region):
            found += _ends(part)
        elif isinstance(part, Node):
            found += [number_of(part)] if is_constant(part) else _numbers(part)
    if None in found or (region.kind == "interval" and not (len(found) == 2 and found[0] <= found[1])):
        raise NoValue("an end that is no number, or an interval that ends before it begins")
    return found


def _numbers(node: Node) -> list[Any]:
    """The numbers in an expression, each with both signs."""
    if node.kind == "number":
        value = Evaluator({}).real(node.parts[0])
        return [value, -value]
    return [value for part in node.parts if isinstance(part, Node) for value in _numbers(part)]


def _holds(region: Region, point: Any) -> bool:
    """Whether the point belongs to the set."""
    parts: Any = region.parts
    if region.kind == "where":
        return _relates(point, *parts)
    holds = (_holds(part, point) for part in parts)
    if region.kind == "minus":
        return next(holds) and not next(holds)
    return any(holds) if region.kind == "union" else all(holds)


def _relates(point: Any, left: Node, relation: str, right: Node) -> bool:
    """Whether a relation holds at a point."""
    (name,) = symbols(left) | symbols(right)
    evaluator = Evaluator({name: point})
    try:
        one, other = (evaluator.real(evaluator(side)) for side in (left, right))
    except NoValue:
        return False
    apart = one.real - other.real
    size = NEAR * max(1, abs(other))
    if abs(one.imag) > size or abs(other.imag) > size:
        return False
    if abs(apart) < size:
        return relation in ("=", r"\le", r"\ge")
    return relation == r"\ne" or (relation != "=" and bool(apart < 0) == (relation in ("<", r"\le")))


logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off

READING = LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
    ),
)

# Limits of what sympy is given.
MAX_CHARACTERS = 400
MAX_NESTING = 12
MAX_FUNCTIONS = 6
MAX_EXPONENT = 12

FUNCTION = "|".join([*FUNCTIONS, "mod"])
WORD = re.compile(rf"(?<![\\A-Za-z])(?!(?:{FUNCTION})(?![A-Za-z]))[A-Za-z]{{3,}}")
ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[A-Za-z]+\*?\}(?:\{[clr|]+\})?")
COSTLY = re.compile(r"\\(?:sum|prod|i*int|oint|lim|bigcup|bigcap|binom)(?![A-Za-z])|!|[0-9]{7}")
BRACES = str.maketrans("([)]", "{{}}")
EXPONENT = re.compile(r"\^\s*(\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}|-?[0-9]+|.?)", re.DOTALL)
"""A bare `{` where braces are nested more deeply."""
SLOPPY = re.compile(
    r"(?<!_)[0-9]\s+[0-9]|[0-9]\s*_|[=<>:~?⟪]|\\(?:equiv|pmod|bmod|approx|overline|underline)(?![A-Za-z])"
)
"""Notation that math-verify reads wrongly: it adds up `1 2`, drops the base of a number, takes one side of `3 = 5`."""
SPELLING = {"⦃": r"\{", "⦄": r"\}", "°": r"^\circ ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ",
            "⌉": r"\rceil ", "⟨": r"\langle ", "⟩": r"\rangle ", "ℝ": r"\mathbb{R}"}  # fmt: skip


def verified(given: str, expected: str) -> bool:
    """Whether math-verify finds two texts in normal spelling equal; False if one of them is not for sympy."""
    if not _is_for_sympy(given) or not _is_for_sympy(expected):
        return False
    return verify(_parsed(expected), _parsed(given), timeout_seconds=None)


@lru_cache(maxsize=256)
def _parsed(text: str) -> list[Any]:
    """The text as math-verify parses it; cached because the rollouts of a group share their expected answer."""
    for mark, spelling in SPELLING.items():
        text = text.replace(mark, spelling)
    return parse(rf"\boxed{{{text}}}", [READING], fallback_mode="no_fallback", parsing_timeout=0)


def _is_for_sympy(text: str) -> bool:
    """Whether the text is mathematics and small enough to compute with."""
    plain = ENVIRONMENT.sub("", text)
    return (
        len(text) <= MAX_CHARACTERS
        and not any(each.search(plain) for each in (WORD, COSTLY, SLOPPY))
        and len(re.findall(rf"(?:{FUNCTION})(?![A-Za-z])", text)) <= MAX_FUNCTIONS
        and _is_shallow(text)
        and _powers_are_small(text)
    )


def _is_shallow(text: str) -> bool:
    """Whether brackets are closed and not nested too deeply."""
    depth = 0
    for mark in text:
        depth += (mark in "({[") - (mark in ")}]")
        if not 0 <= depth <= MAX_NESTING:
            return False
    return depth == 0


def _powers_are_small(text: str) -> bool:
    """Whether there is no power of a power and no large exponent."""
    exponents = EXPONENT.findall(text.translate(BRACES))
    sizes = [int(number[:9]) for exponent in exponents for number in re.findall("[0-9]+", exponent)]
    return sum(sizes) <= MAX_EXPONENT and not any("^" in exponent or exponent == "{" for exponent in exponents)
