"""Whether two mathematical answers are the same: by their text, else by what kind of answer each is.

A unit that is left out does not count against an answer, a different one does. Nothing here can compute for long: see
`_math_value.py` for the bounds.
"""

import re
from collections.abc import Callable
from fractions import Fraction

from podium.reward._math_answer import as_region, is_name, readings
from podium.reward._math_compare import is_constant, number_of, same_equation, same_value, solves, symbols
from podium.reward._math_form import normal, squeezed
from podium.reward._math_kinds import (
    Amount,
    Answer,
    Clock,
    Congruence,
    Equation,
    Inequality,
    Items,
    Matrix,
    Ratio,
    Region,
    Words,
)
from podium.reward._math_number import Node, Unreadable, number
from podium.reward._math_read import read_expression
from podium.reward._math_region import same_region
from podium.reward._math_units import CURRENCIES, Unit
from podium.reward._math_verify import verified

CHOICE = re.compile(r"\(\s*([A-Z])\s*\)\s*(.*)|([A-Z])\s*(?:\)|[.:](?=\s|$))\s*(.*)", re.DOTALL)
PI = Node("symbol", ("pi",))


def same_answer(given: str, expected: str) -> bool:
    """Whether `given` is what `expected` is."""
    mine, wanted = normal(given), normal(expected)
    if not mine or not wanted:
        return False
    if squeezed(mine) == squeezed(wanted):
        return True
    chosen = _by_choice(mine, wanted)
    if chosen is not None:
        return chosen
    mine_read, wanted_read = _alone(readings(mine)), _alone(readings(wanted))
    if any(_same(one, other) for other in wanted_read for one in mine_read):
        return True
    return _is_unread(mine_read, wanted_read) and verified(mine, wanted)


def _alone(found: tuple[Answer, ...]) -> list[Answer]:
    """The readings, where a set or list of a single answer is that answer too."""
    several = [
        _distinct(_values(list(each.items)))
        for each in found
        if isinstance(each, Items) and each.kind in ("set", "list")
    ]
    return [*found, *(items[0] for items in several if len(items) == 1)]


def _is_unread(*sides: list[Answer]) -> bool:
    """Whether one of two answers is in a notation of its own: neither words nor anything that was read."""
    return any(isinstance(side[0], Words) and "\\" in side[0].source for side in sides)


def _by_choice(mine: str, wanted: str) -> bool | None:
    """By the letter of a choice, where the expected answer is one; `(B) 12` is `B`, and `12` is `(B) 12`."""
    given, label = _choice(mine), _choice(wanted)
    if label is None:
        return None
    letter, content = label
    if given is not None:
        return given[0].upper() == letter.upper()
    if not content:
        return False if letter.isupper() and len(mine) > 1 and not re.search("[=]", mine) else None
    return any(_same(one, other) for other in readings(normal(content)) for one in readings(mine))


def _choice(text: str) -> tuple[str, str] | None:
    """The letter of a choice and what stands behind it."""
    plain = re.sub("[⟪⟫]", " ", text).strip(" .{}")
    if re.fullmatch(r"\(?\s*[A-Za-z]\s*\)?", plain):
        return re.sub("[^A-Za-z]", "", plain), ""
    if match := CHOICE.fullmatch(plain):
        return match[1] or match[3], (match[2] or match[4] or "").strip()
    return None


def _same(one: Answer, other: Answer) -> bool:
    """Whether the answer `one` is the expected answer `other`."""
    if isinstance(one, Equation) or isinstance(other, Equation):
        return _same_equations(one, other)
    if isinstance(one, Amount) and isinstance(other, Amount):
        return _same_amount(one, other)
    if isinstance(one, Words) and isinstance(other, Words):
        return bool(one.text) and one.text == other.text
    if isinstance(one, Clock) and isinstance(other, Clock):
        apart = abs(one.minutes - other.minutes) % 1440
        return apart == 0 or (apart == 720 and not (one.is_certain and other.is_certain))
    if isinstance(one, Ratio) or isinstance(other, Ratio):
        return _same_ratio(one, other)
    if isinstance(one, Congruence):
        return _same_congruence(one, other)
    if isinstance(one, Inequality) and isinstance(other, Inequality):
        return one.is_strict == other.is_strict and same_equation(one.below, other.below, is_ordered=True)
    if isinstance(one, Matrix) or isinstance(other, Matrix):
        return _same_matrix(one, other)
    if isinstance(one, Region) or isinstance(other, Region):
        mine, wanted = as_region(one), as_region(other)
        return mine is not None and wanted is not None and same_region(mine, wanted)
    return _same_items(one, other)


# ---- amounts


def _same_amount(one: Amount, other: Amount) -> bool:
    return any(
        _same_quantity(one, mine, other, wanted) for mine in one.units or (None,) for wanted in other.units or (None,)
    )


def _same_quantity(one: Amount, mine: Unit | None, other: Amount, wanted: Unit | None) -> bool:
    if mine is None or wanted is None:
        if one.needs_unit or other.needs_unit:
            return False
        bare, measured, unit = (one.value, other.value, wanted) if mine is None else (other.value, one.value, mine)
        is_percent_too_small = mine is not None and mine.name == "percent" and _is_at_most_1(one.value)
        return (same_value(bare, measured) and not is_percent_too_small) or (
            unit is not None and unit.name in ("percent", "angle") and same_value(bare, _in_base(measured, unit))
        )
    if mine.things or wanted.things:
        is_same = mine.things <= wanted.things or wanted.things <= mine.things
        return is_same and bool(mine.things and wanted.things) and same_value(one.value, other.value)
    if {mine.name, wanted.name} == {"angle", "radian"}:
        return same_value(_in_base(one.value, mine), _in_base(other.value, wanted))
    if mine.dimensions != wanted.dimensions:
        money = [unit.name in CURRENCIES.values() for unit in (mine, wanted)]
        is_part = mine.dimensions <= wanted.dimensions or wanted.dimensions <= mine.dimensions
        return any(money) and is_part and same_value(one.value, other.value)  # $5 an hour is $5
    if mine.size == wanted.size:
        return same_value(one.value, other.value)
    return same_value(_times(one.value, mine.size), _times(other.value, wanted.size))


def _is_at_most_1(value: Node) -> bool:
    """0.17 % is no 0.17, though 17 % is a 17 whose sign was left out."""
    number = number_of(value)
    return number is not None and abs(number) <= 1


def _in_base(value: Node, unit: Unit) -> Node:
    """A percentage as a share, an angle in radians."""
    if unit.name == "percent":
        return _times(value, Fraction(1, 100))
    return Node("over", (Node("times", (_times(value, unit.size), PI)), number(180))) if unit.name == "angle" else value


def _times(value: Node, factor: Fraction) -> Node:
    return Node("times", (value, number(factor)))


def _same_ratio(one: Answer, other: Answer) -> bool:
    terms = [each.terms if isinstance(each, Ratio) else None for each in (one, other)]
    if terms[0] and terms[1]:
        mine, wanted = terms[0], terms[1]
        return len(mine) == len(wanted) and all(
            same_value(Node("times", (mine[0], right)), Node("times", (wanted[0], left)))
            for left, right in zip(mine[1:], wanted[1:], strict=True)
        )
    ratio, amount = (terms[0], other) if terms[0] else (terms[1], one)
    if not ratio or len(ratio) != 2 or not isinstance(amount, Amount) or amount.units != (None,):
        return False
    return same_value(Node("over", ratio), amount.value)


def _same_congruence(one: Congruence, other: Answer) -> bool:
    """Residues are the same by the modulus; where the label is a bare number, that number is meant."""
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
    difference = Node("over", (Node("add", (left.value, Node("minus", (right.value,)))), modulus))
    return same_value(difference, Node("floor", (difference,)))


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
    if isinstance(one, Items) and isinstance(other, Items):
        kinds = {one.kind, other.kind}
        if named := _by_names(one, other):
            return named == "same"
        mine, wanted = _members(one), _members(other)
        if kinds <= {"list", "set"}:
            mine, wanted = _values(mine), _values(wanted)
            if "set" in kinds:
                mine, wanted = _distinct(mine), _distinct(wanted)
            return len(mine) == len(wanted) and _matched(mine, wanted)
        if "set" in kinds or len(mine) != len(wanted):
            return False
        if len(kinds) > 1 and len(mine) == 2 and kinds & {"[]", "(]", "[)"}:
            return False
        return all(_same(left, right) for left, right in zip(mine, wanted, strict=True))
    return False


def _distinct(items: list[Answer]) -> list[Answer]:
    found: list[Answer] = []
    for each in items:
        if not any(_same(each, other) for other in found):
            found.append(each)
    return found


def _values(items: list[Answer]) -> list[Answer]:
    """What names of one kind are said to be: `x = 2`, `x = 3` are 2 and 3."""
    names = [each.sides[0] if isinstance(each, Equation) and is_name(each.sides[0]) else "" for each in items]
    if len(set(names) - {""}) == 1 or not any(names):
        return [
            _value(each) if isinstance(each, Equation) and name else each
            for each, name in zip(items, names, strict=True)
        ]
    return items


def _by_names(one: Items, other: Items) -> str:
    """Whether `x = 2, y = 3` are the same as another such list, or as the point (2, 3); empty if they are none."""
    named = [_names(each) if each.kind == "list" else {} for each in (one, other)]
    if named[0] and named[1]:
        is_same = named[0].keys() == named[1].keys() and all(_same(named[0][key], named[1][key]) for key in named[0])
        return "same" if is_same else "different"
    if (names := named[0] or named[1]) and (point := other if named[0] else one).kind != "set":
        values = [names[key] for key in sorted(names)]
        if point.kind == "list":
            return "same" if len(values) == len(point.items) and _matched(values, list(point.items)) else "different"
        is_same = len(values) == len(point.items) and all(map(_same, values, point.items))
        return "same" if is_same else "different"
    return ""


def _names(items: Items) -> dict[str, Answer]:
    equations = [each for each in items.items if isinstance(each, Equation) and is_name(each.sides[0])]
    names = {squeezed(each.sides[0]): _value(each) for each in equations}
    return names if len(names) == len(items.items) > 1 else {}


def _same_matrix(one: Answer, other: Answer) -> bool:
    if isinstance(one, Matrix) and isinstance(other, Matrix):
        return [*map(len, one.rows)] == [*map(len, other.rows)] and all(
            _same(left, right)
            for mine, wanted in zip(one.rows, other.rows, strict=True)
            for left, right in zip(mine, wanted, strict=True)
        )
    matrix, point = (one, other) if isinstance(one, Matrix) else (other, one)
    if isinstance(matrix, Matrix) and isinstance(point, Items) and point.kind in ("()", "⟨⟩"):
        column = [cell for row in matrix.rows for cell in row]
        return (
            all(len(row) == 1 for row in matrix.rows)
            and len(column) == len(point.items)
            and all(map(_same, column, point.items))
        )
    return False


# ---- equations


def _value(equation: Equation) -> Answer:
    """What the last side says."""
    return readings(equation.sides[-1])[0]


def _turned(equation: Equation) -> Equation:
    """With the name in front: `5 = x` as `x = 5`."""
    if len(equation.sides) == 2 and is_name(equation.sides[1]) and not is_name(equation.sides[0]):
        return Equation(equation.sides[::-1])
    return equation


def _same_equations(one: Answer, other: Answer) -> bool:
    if isinstance(one, Equation) and isinstance(other, Equation):
        mine, wanted = _turned(one), _turned(other)
        names = [squeezed(each.sides[0]) if is_name(each.sides[0]) else "" for each in (mine, wanted)]
        if names[0] and names[1] and (names[0] == names[1] or all(map(_is_of_a_function, names))):
            return _is_consistent(mine) and any(
                _same(left, right) for left in readings(mine.sides[-1]) for right in readings(wanted.sides[-1])
            )
        return _same_curve(mine, wanted, names)
    if isinstance(one, Equation):
        mine = _turned(one)
        if not _is_consistent(mine) or not _gives_a_value(mine):
            return False
        return any(_same(left, other) for left in readings(mine.sides[-1]))
    if isinstance(other, Equation):
        wanted = _turned(other)
        return (is_name(wanted.sides[0]) or _is_identity(wanted)) and any(
            _same(one, right) for right in readings(wanted.sides[-1])
        )
    return False


def _is_of_a_function(name: str) -> bool:
    return name == "y" or re.fullmatch(r"[fgh]\([a-z]\)", name) is not None


def _nodes(sides: tuple[str, ...]) -> list[Node] | None:
    try:
        return [read_expression(side) for side in sides]
    except (Unreadable, RecursionError):
        return None


def _is_identity(equation: Equation) -> bool:
    nodes = _nodes(equation.sides)
    return nodes is not None and all(same_value(nodes[0], each) for each in nodes[1:])


def _is_consistent(equation: Equation) -> bool:
    """Whether what stands between the first side and the last one, where it is constant, is what the last one is."""
    last = readings(equation.sides[-1])
    for side in equation.sides[1:-1]:
        for each in readings(side)[:1]:
            if isinstance(each, Amount) and is_constant(each.value) and not any(_same(each, end) for end in last):
                return False
    return True


def _gives_a_value(equation: Equation) -> bool:
    """Whether an equation is an answer: a name or letters in front of a value, or sides that are equal."""
    if is_name(equation.sides[0]) or _is_identity(equation):
        return True
    first, last = readings(equation.sides[0])[0], readings(equation.sides[-1])[0]
    return (
        isinstance(first, Amount)
        and not is_constant(first.value)
        and not (isinstance(last, Amount) and not is_constant(last.value))
    )


def _same_curve(one: Equation, other: Equation, names: list[str]) -> bool:
    """Whether two equations have the same solutions, as far as multiples and solving for a name can tell."""
    mine, wanted = _nodes(one.sides), _nodes(other.sides)
    if mine is None or wanted is None or len(mine) != 2 or len(wanted) != 2:
        return False
    differences = [Node("add", (left, Node("minus", (right,)))) for left, right in (mine, wanted)]
    if same_equation(differences[0], differences[1]):
        return True
    if names[0] in symbols(differences[1]) and not is_constant(mine[1]):
        return solves(names[0], mine[1], differences[1])
    if names[1] in symbols(differences[0]) and not is_constant(wanted[1]):
        return solves(names[1], wanted[1], differences[0])
    return False
