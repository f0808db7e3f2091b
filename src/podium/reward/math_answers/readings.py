"""What a mathematical answer says: its text in normal spelling is read as one or more kinds of answers.

A text may have several readings: `1,234` is a number and a list, `5m` a product and a length. All are returned, the
likeliest first. A text that is nothing else is `Words`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise, product

from podium.reward.math_answers.expressions import (
    Node,
    Unreadable,
    difference,
    number,
    read_beginning,
    read_expression,
    read_expressions,
)
from podium.reward.math_answers.spelling import split_at, squeezed, trimmed, with_joined_groups
from podium.reward.math_answers.units import DEGREE, PERCENT, Unit, currency, number_in_words, read_suffix
from podium.reward.math_answers.values import is_constant, symbols

# ---- kinds of answers


@dataclass(frozen=True)
class Amount:
    """A number or an expression, perhaps with a unit."""

    value: Node
    units: tuple[Unit | None, ...] = (None,)
    """The units that the text may mean."""
    needs_unit: bool = False
    """Whether the amount only counts with its unit, because it is more likely a product (`5m`)."""


@dataclass(frozen=True)
class Items:
    """Several answers: `list` (bare), `set`, by its brackets `()`, `[]`, `[)`, `(]`, `⟨⟩`, a `matrix` or its `row`.

    A matrix with one column is a `column`, and a : b : c is a `ratio` of two amounts, b/a and c/a.
    """

    kind: str
    items: tuple["Answer", ...]


@dataclass(frozen=True)
class Region:
    """A set of numbers, as what is said of them: a kind and its parts.

    `where` has two sides and their relation; `union`, `both` (the intersection) and `minus` have other sets; an
    `interval` is a `both` with a lower and an upper end. The set without a number is the `union` of nothing, the set of
    all numbers is `both` of nothing.
    """

    kind: str
    parts: tuple["Region | Node | str", ...] = ()
    variable: str | None = None


@dataclass(frozen=True)
class Equation:
    """Sides that are said to be equal, as texts, because names are compared as texts."""

    sides: tuple[str, ...]

    @property
    def name(self) -> str:
        """The first side if it only names the value of the others, else empty."""
        return squeezed(self.sides[0]) if is_name(self.sides[0]) else ""

    @property
    def values(self) -> tuple["Answer", ...]:
        """The readings of the last side."""
        return readings(self.sides[-1])


@dataclass(frozen=True)
class Inequality:
    """An inequality in several variables: an expression that is below zero, or also zero if not strict."""

    below: Node
    is_strict: bool


@dataclass(frozen=True)
class Congruence:
    """Residues for a modulus."""

    name: str
    residues: "Answer"
    modulus: Node


@dataclass(frozen=True)
class Clock:
    """The times of day, in minutes, that a text may mean: two if it does not say which half of the day."""

    minutes: frozenset[int]


@dataclass(frozen=True)
class Words:
    """Anything else: in small letters for comparison, and as it was."""

    text: str
    source: str = field(default="", compare=False)


Answer = Amount | Items | Region | Equation | Inequality | Congruence | Clock | Words

MAX_CHARACTERS = 1000
MAX_ITEMS = 60
MAX_SIGNS = 3
POINT = Node("symbol", ("a point",))
"""Any number of a set; no text has a symbol of this name."""
CLOCK = re.compile(
    r"([01]?[0-9]|2[0-4])(?:\s*:\s*([0-5][0-9]))?\s*([ap])\.?\s?m\b\.?|([01]?[0-9]|2[0-4])\s*:\s*([0-5][0-9])", re.I
)
COLON = re.compile(r":|\s+to\s+")
OR = re.compile(r"\s*,?\s+or\s+")
SEPARATOR = re.compile(r"\s*(?:,\s*and\b|,\s*or\b|\band\b|\bor\b|[,;])\s*|\\\\|\\(?:quad|qquad)(?![A-Za-z])")
SENTENCE = re.compile(
    r"⟪(?![^⟪⟫]*\b(?:not|than|between|about|least|most)\b)[^⟪⟫0-9]*\b(?:is|are|equals)\s*:?\s*⟫\s*(?=\S)"
)
SIGN = re.compile(r"\\(pm|mp)(?![A-Za-z])")
RELATION = re.compile(r"\\(?:le|ge|ne|in|equiv|approx|cong|sim)(?![A-Za-z])|:=|[=<>]")
IMPLIES = re.compile(r"\\(?:implies|iff|Rightarrow|Leftrightarrow|therefore|Longrightarrow)(?![A-Za-z])")
SETS = re.compile(r"\\(cup|cap|setminus|backslash)(?![A-Za-z])")
MODULUS = re.compile(
    r"\\pmod\s*(?:\{(?P<braced>[^{}]*)\}|(?P<bare>[0-9]+|[A-Za-z]))|\(\s*(?:\\?b?mod\s*|⟪mod⟫\s*)(?P<round>[^()]*)\)"
    r"|(?:\\b?mod|\bmod)\s*(?:\{(?P<group>[^{}]*)\}|(?P<plain>[0-9A-Za-z]+))"
)
MATRIX = re.compile(r"\\begin\s*\{([bpBvV]?matrix|array)\}(?:\{[clr| ]+\})?(.*)\\end\s*\{\1\}", re.DOTALL)
INTERVALS = ("()", "[]", "(]", "[)")
NUMBERS, NOTHING = Region("both"), Region("union")
NAMED_SETS = {
    **dict.fromkeys(("ℝ", "allreals", "allrealnumbers", "realnumbers", "anyrealnumber"), NUMBERS),
    **dict.fromkeys(("nosolution", "nosolutions", "norealsolution", "norealsolutions"), NOTHING),
    **dict.fromkeys(("emptyset", "theemptyset", "⦃⦄"), NOTHING),
}
SAME_WORDS = {"dne": "doesnotexist", "thelimitdoesnotexist": "doesnotexist", "t": "true", "f": "false"}


# ---- from a text to its readings


@lru_cache(maxsize=1024)
def readings(text: str) -> tuple[Answer, ...]:
    """Every way to read a text in normal spelling, the likeliest first."""
    if len(text) > MAX_CHARACTERS:
        return (Words(text),)
    found: list[Answer] = []
    for each in dict.fromkeys((with_joined_groups(text), text)):
        found += _read_with_signs(each)
    return tuple(dict.fromkeys(found))


def _read_with_signs(text: str) -> list[Answer]:
    r"""The readings of a text in which each `\pm` stands for both signs: the list of what it says with each choice."""
    upper = ["+" if sign == "pm" else "-" for sign in SIGN.findall(text)]
    if not upper:
        return _read(text)
    if len(upper) > MAX_SIGNS:
        return [Words(text)]
    choices = [[upper, ["-" if sign == "+" else "+" for sign in upper]]]  # all upper signs, or all lower ones
    if len(upper) > 1 and "-" not in upper:
        choices.append([*map(list, product("+-", repeat=len(upper)))])
    return [Items("list", tuple(_first(_with_signs(text, signs)) for signs in each)) for each in choices]


def _with_signs(text: str, signs: list[str]) -> str:
    left = iter(signs)
    return SIGN.sub(lambda _: f" {next(left)} ", text)


def _first(text: str) -> Answer:
    return _read(trimmed(text))[0]


def _read(text: str) -> list[Answer]:
    """The readings of a text without `±`."""
    text = _unwrapped(text)
    if IMPLIES.search(text):
        text = trimmed(split_at(text, IMPLIES)[0][-1])
    if match := SENTENCE.match(text):
        text = trimmed(text[match.end() :])
    if long := _compound(text):
        return [long]
    if time := _clock(text):
        return [time, *_ratios(text)]
    if (match := MODULUS.search(text)) and not text[match.end() :].strip(" )"):
        return _congruence(text[: match.start()], match)
    alternatives, _ = split_at(text, OR)
    if len(alternatives) > 1 and any(re.search(r"[<>]|\\(?:[lg]e|in)(?![A-Za-z])", part) for part in alternatives):
        return [_joined("union", [_first(part) for part in alternatives]) or Words(words(" or ".join(alternatives)))]
    parts, _ = split_at(text, SEPARATOR)
    if 1 < len(parts) <= MAX_ITEMS and all(parts):
        return [_several(text, parts)]
    return _single(text)


def _unwrapped(text: str) -> str:
    """Without the braces, or the marks of text, around the whole."""
    text = trimmed(text)
    while (match := re.fullmatch(r"\{(.*)\}|⟪([^⟪⟫]*)⟫", text, re.DOTALL)) and (match[2] or _is_closed(text)):
        inner = trimmed(match[2] if match[1] is None else match[1])
        if match[1] is not None and "," in inner and len(split_at(inner, SEPARATOR)[0]) > 1:
            return f"⦃{inner}⦄"  # plain text has no other braces for a set
        if not inner or inner == text:
            break
        text = inner
    return text


def _is_closed(text: str) -> bool:
    """Whether the first bracket is closed by the last mark."""
    return len(text) > 1 and len(split_at(text[:-1] + " ", re.compile(r"(?<=.).(?=\s*$)", re.DOTALL))[0]) == 1


def _several(text: str, parts: list[str]) -> Answer:
    """Parts between commas, `and` and `or`: a list, or inequalities that hold together."""
    members = [_first(part) for part in parts]
    are_relations = all(isinstance(each, Region) and each.kind in ("where", "both", "minus") for each in members)
    if are_relations and (joined := _joined("both", members)):
        return joined
    name, sides = "", split_at(parts[0], RELATION)
    if sides[1] in (["="], [r"\in"]) and is_name(sides[0][0]) and not any(isinstance(m, Equation) for m in members[1:]):
        name = sides[0][0]  # x = 2, 3
        members[0] = _first(sides[0][1])
    num_words = sum(isinstance(each, Words) for each in members)
    return Words(words(text)) if not name and 0 < num_words < len(members) else Items("list", tuple(members))


def _joined(kind: str, members: Sequence[Answer]) -> Region | None:
    """The union or intersection of sets; None if a member is no set."""
    regions = [each for each in members if isinstance(each, Region)]
    variable = next((each.variable for each in regions if each.variable), None)
    return Region(kind, tuple(regions), variable) if len(regions) == len(members) else None


def _single(text: str) -> list[Answer]:
    """The readings of a text that is no list."""
    if special := _sets(text):
        return [special]
    sides, relations = split_at(text, RELATION)
    if relations:
        return _related(sides, relations)
    if bracket := _bracketed(text):
        return [bracket]
    if (match := MATRIX.fullmatch(text)) and match[1] != "vmatrix":
        rows = [split_at(row, re.compile("&"))[0] for row in split_at(trimmed(match[2]), re.compile(r"\\\\"))[0] if row]
        if all(len(row) == 1 for row in rows):
            return [Items("column", tuple(_first(cell) for (cell,) in rows))]
        return [Items("matrix", tuple(Items("row", tuple(map(_first, row))) for row in rows))]
    found: list[Answer] = [*_amounts(text), *_ratios(text)]
    return found or [Words(words(text), text)]


def words(text: str) -> str:
    """Words for comparison: small letters, no white space, no articles, no marks around them."""
    text = re.sub(r"[⟪⟫\"'`{}]|\\", " ", text).strip().lower()
    text = re.sub(r"^(?:[a-z]|it|this|that|he|she|they|the \w+)\s+(?:is|are|was)\s+(?!not\b)", "", text)
    text = re.sub(r"\b(?:a|an|the)\s+(?=\w)", "", text)
    text = squeezed(text.strip(" .,;:!"))
    text = re.sub(r"^\(([a-z]+)\)$", r"\1", text)
    return SAME_WORDS.get(text, text)


# ---- amounts, times, ratios


def _amounts(text: str) -> list[Amount]:
    """An expression, perhaps with a currency before it or a unit behind it."""
    if match := re.fullmatch(r"([+-]?)\s*¤([A-Z]{3})\s*(.+)|(.+?)\s*¤([A-Z]{3})(.*)", text):
        code, rest = match[2] or match[5], trimmed(match[1] + match[3] if match[2] else match[4] + " " + match[6])
        return [Amount(each.value, tuple(_paid(code, unit) for unit in each.units)) for each in _amounts(rest)]
    if text.endswith("%") and "%" not in text[:-1]:
        return [Amount(each.value, (PERCENT,)) for each in _amounts(trimmed(text[:-1]))]
    if match := re.fullmatch(r"(.*[0-9)}])\s*°\s*⟪?([CF])⟫?", text):
        unit = Unit(frozenset([({"C": "celsius", "F": "fahrenheit"}[match[2]], 1)]))
        return [Amount(each.value, (unit,)) for each in _amounts(match[1])]
    if number_and_rest := number_in_words(text.replace("⟪", " ").replace("⟫", " ")):
        value, rest = number_and_rest
        suffix = read_suffix(rest)
        return [Amount(number(value * suffix[0]), tuple(suffix[1]))] if suffix else []
    if re.fullmatch("[A-Za-z]{3,}", text):
        return []
    try:
        value, end = read_beginning(text)
    except Unreadable:
        return []
    if not text[end:].strip():
        angle = _degrees(value)
        return [Amount(value) if angle is None else Amount(angle, (DEGREE,)), *_letter_unit(text)]
    suffix = read_suffix(text[end:].strip())
    if suffix is None or (not is_constant(value) and any(unit is None or unit.things for unit in suffix[1])):
        return []
    factor, units = suffix
    return [Amount(value if factor == 1 else Node("times", (value, number(factor))), tuple(units))]


def _degrees(node: Node) -> Node | None:
    """The expression without the degree sign at its end; None without that sign."""
    if node.kind == "degrees":
        return node.parts[0]
    inner = _degrees(node.parts[-1]) if node.kind in ("minus", "group", "times") else None
    return None if inner is None else Node(node.kind, (*node.parts[:-1], inner))


def _paid(code: str, unit: Unit | None) -> Unit:
    """An amount of money, perhaps for each of something."""
    money = currency(code)
    if unit is None or unit.things or unit == money:
        return money
    return Unit(money.dimensions | unit.dimensions, unit.size)


def _letter_unit(text: str) -> list[Amount]:
    """`5 m` as a length; without a space a product is more likely."""
    match = re.fullmatch(r"(.*[0-9}])(\s*)([mgshlJNLW](?:/[hs])?(?:\^\{?[23]\}?)?)", text)
    suffix, value = (read_suffix(match[3]), read_expressions([match[1]])) if match else (None, None)
    if match and suffix and value and suffix[1] != [None] and not any(unit and unit.things for unit in suffix[1]):
        return [Amount(value[0], tuple(suffix[1]), needs_unit=not match[2])]
    return []


def _compound(text: str) -> Amount | None:
    """`1 hour 30 minutes` or `5 ft 6 in` as one amount."""
    plain = re.sub(r"[⟪⟫{}]|\band\b|,", " ", text)
    if not re.fullmatch(r"\s*(?:[0-9]+(?:\.[0-9]+)?\s*[A-Za-z]+\.?\s*){2,4}", plain):
        return None
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\.?\s*", plain)
    units = [suffix[1][0] if (suffix := read_suffix(word)) else None for _, word in parts]
    first = units[0]
    if first is None or first.name not in ("length", "time", "month", "mass", "dollar", "angle"):
        return None
    sizes = [unit.size for unit in units if unit is not None and unit.dimensions == first.dimensions]
    if len(sizes) < len(parts) or sizes != sorted(set(sizes), reverse=True):
        return None
    total = sum(Fraction(value) * size for (value, _), size in zip(parts, sizes, strict=True))
    return Amount(number(total / sizes[0]), (first,))


def _clock(text: str) -> Clock | None:
    match = CLOCK.fullmatch(re.sub("[⟪⟫]", " ", text).replace("{:}", ":").strip())
    if match is None or (match[3] and int(match[1]) > 12):
        return None
    hours = {int(match[1]) % 12 + (12 if match[3].lower() == "p" else 0)} if match[3] else {int(match[4])}
    if not match[3] and int(match[4]) <= 12 and not match[4].startswith("0"):
        hours.add(int(match[4]) + 12)
    return Clock(frozenset((60 * hour + int(match[2] or match[5] or 0)) % 1440 for hour in hours))


def _ratios(text: str) -> list[Answer]:
    """a : b as the fraction, a : b : c as the ratios to a."""
    terms, signs = split_at(text, COLON)
    nodes = read_expressions(terms) if signs and all(terms) else None
    if nodes is None:
        return []
    if len(nodes) == 2:
        return [Amount(Node("over", tuple(nodes)))]
    return [Items("ratio", tuple(Amount(Node("over", (each, nodes[0]))) for each in nodes[1:]))]


# ---- sets and brackets


def _sets(text: str) -> Region | None:
    """A named set, or one made of others."""
    if named := NAMED_SETS.get(words(text)):
        return named
    parts, signs = split_at(text, SETS)
    if not signs or not all(parts):
        return None
    regions = [as_region(_first("ℝ" if part == "R" else part)) for part in parts]
    found = regions[0]
    for sign, region in zip(signs, regions[1:], strict=True):
        if found is None or region is None:
            return None
        found = Region({r"\cup": "union", r"\cap": "both"}.get(sign, "minus"), (found, region))
    return found


def as_region(answer: Answer) -> Region | None:
    """An interval or a finite set as a set of numbers."""
    if isinstance(answer, Region):
        return answer
    items = answer.items if isinstance(answer, Items) else ()
    values = [each.value for each in items if isinstance(each, Amount)]
    if not isinstance(answer, Items) or len(values) < len(items):
        return None
    if answer.kind in ("set", "list"):
        return Region("union", tuple(Region("where", (POINT, "=", value)) for value in values))
    if len(values) != 2 or answer.kind not in INTERVALS:
        return None
    low, high = (r"\le" if bracket in "[]" else "<" for bracket in answer.kind)
    return Region("interval", (Region("where", (values[0], low, POINT)), Region("where", (POINT, high, values[1]))))


def _bracketed(text: str) -> Answer | None:
    """Brackets around items."""
    if text[:1] not in ("(", "[", "⦃", "⟨") or text[-1:] not in (")", "]", "⦄", "⟩") or not _is_closed(text):
        return None
    kind, inner = text[0] + text[-1], trimmed(text[1:-1])
    if kind == "⦃⦄":
        described, bars = split_at(inner, re.compile(r"\||:"))
        if len(bars) == 1:
            return _first(described[1])  # { x | x > 3 }
        return Items("set", tuple(map(_first, split_at(inner, SEPARATOR)[0])))
    parts, _ = split_at(inner, re.compile(r"\s*[,;]\s*"))
    if not 1 < len(parts) <= MAX_ITEMS or not all(parts):
        return None
    found = Items(kind, tuple(map(_first, parts)))
    is_interval = len(parts) == 2 and (kind in ("(]", "[)") or r"\infty" in inner)
    return as_region(found) if is_interval else found


# ---- relations


def _related(sides: list[str], relations: list[str]) -> list[Answer]:
    """An equation, an inequality, a congruence without a modulus, or membership."""
    if relations[0] == r"\in":
        return [_first(sides[1])] if len(sides) == 2 else [Words(words(" in ".join(sides)))]
    if all(relation in ("=", r"\approx", ":=", r"\cong", r"\sim") for relation in relations):
        about = relations.index(r"\approx") if r"\approx" in relations else 0
        if about or (relations[0] == r"\approx" and sides[0] and not is_name(sides[0])):
            sides = sides[: about + 1]  # what follows is only a rounded value
        sides = [side for side in sides if side]
        if len(sides) == 2 and is_name(sides[1]) and not is_name(sides[0]):
            sides = sides[::-1]  # 5 = x
        return [Equation(tuple(sides))] if len(sides) > 1 else _read(sides[0]) if sides else [Words("")]
    if r"\equiv" in relations or not all(sides):
        return [Words(words(" ".join(sides)))]
    nodes = read_expressions(sides)
    names = frozenset[str]().union(*map(symbols, nodes or []))
    if nodes and len(names) == 1:
        pairs = zip(pairwise(nodes), relations, strict=True)
        where = [Region("where", (left, relation, right), *names) for (left, right), relation in pairs]
        return [where[0] if len(where) == 1 else Region("both", tuple(where), *names)]
    if nodes and len(relations) == 1 and relations[0] != r"\ne":
        low, high = nodes if relations[0] in ("<", r"\le") else nodes[::-1]
        return [Inequality(difference(low, high), relations[0] in "<>")]
    return [Words(squeezed("".join(side + sign for side, sign in zip(sides, [*relations, ""], strict=True))))]


def is_name(text: str) -> bool:
    """Whether a side of an equation only names the value of the other side: `x`, `a_n`, `f(x)`, `P(A)`, `Area`."""
    text = re.sub(r"\\(?:angle|triangle|overline|vec|bar|hat|mathbb|det|deg)(?![A-Za-z])\s*", "", text).strip()
    letter = r"(?:[A-Za-z]|\\[A-Za-z]+\s*)(?:\^\{?-1\}?)?'*(?:_(?:\{[^{}]*\}|\\?[A-Za-z]+|[0-9]))?'*"
    plain = (
        rf"{letter}\s*(?:\([^=]*\)|\[[^=]*\]|\{{[A-Z]+\}})?|[A-Z]{{2,}}|\|\s*[A-Za-z]+\s*\|"
        rf"|\(\s*{letter}(?:\s*,\s*{letter})+\s*\)"
    )
    if re.fullmatch(rf"\{{?(?:{plain}|\\frac\s*\{{d.*\}}\s*\{{d.*\}})\}}?", text):
        return not re.fullmatch(r"[ei]|\\(?:pi|infty)\s*", text)
    return re.fullmatch(r"[⟪⟫A-Za-z_(){} ]*⟪[^0-9]*⟫[⟪⟫A-Za-z_(){} ]*|[A-Za-z]{3,}(?: [A-Za-z]+)*", text) is not None


def _congruence(text: str, match: re.Match[str]) -> list[Answer]:
    sides, _ = split_at(trimmed(text).rstrip("("), re.compile(r"\\equiv(?![A-Za-z])|="))
    modulus = next(group for group in match.groups() if group is not None)
    try:
        return [Congruence(squeezed(" ".join(sides[:-1])), _first(sides[-1]), read_expression(modulus.strip()))]
    except Unreadable:
        return [Words(words(text + match[0]))]
