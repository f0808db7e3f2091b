"""What an answer is: an amount, a list, a point, an interval, an equation, a time or words.

A text may be read in several ways (`1,234` is a number or two; `5 m` is a length or a product); each is a reading.
"""

import re
from functools import lru_cache

from podium.reward._math_amount import amounts, clock, compound, ratios, words
from podium.reward._math_compare import symbols
from podium.reward._math_form import split_at, squeezed, trimmed, with_joined_groups
from podium.reward._math_kinds import Amount, Answer, Congruence, Equation, Inequality, Items, Matrix, Region, Words
from podium.reward._math_number import Node, Unreadable
from podium.reward._math_read import read_expression

MAX_CHARACTERS = 1000
MAX_ITEMS = 60
MAX_SIGNS = 3


OR = re.compile(r"\s*,?\s+or\s+")
SEPARATOR = re.compile(r"\s*(?:,\s*and\b|,\s*or\b|\band\b|\bor\b|[,;])\s*|\\\\|\\(?:quad|qquad)(?![A-Za-z])")
SENTENCE = re.compile(
    r"⟪(?![^⟪⟫]*\b(?:not|than|between|about|least|most)\b)[^⟪⟫0-9]*\b(?:is|are|equals)\s*:?\s*⟫\s*(?=\S)"
)
RELATION = re.compile(r"\\(?:le|ge|ne|in|equiv|approx|cong|sim)(?![A-Za-z])|:=|[=<>]")
IMPLIES = re.compile(r"\\(?:implies|iff|Rightarrow|Leftrightarrow|therefore|Longrightarrow)(?![A-Za-z])")
SETS = re.compile(r"\\(cup|cap|setminus|backslash)(?![A-Za-z])")
MODULUS = re.compile(
    r"\\pmod\s*(?:\{(?P<braced>[^{}]*)\}|(?P<bare>[0-9]+|[A-Za-z]))|\(\s*(?:\\?b?mod\s*|⟪mod⟫\s*)(?P<round>[^()]*)\)"
    r"|(?:\\b?mod|\bmod)\s*(?:\{(?P<group>[^{}]*)\}|(?P<plain>[0-9A-Za-z]+))"
)
MATRIX = re.compile(r"\\begin\s*\{([bpBvV]?matrix|array)\}(?:\{[clr| ]+\})?(.*)\\end\s*\{\1\}", re.DOTALL)
NAMED_SETS = {
    "ℝ": "all", "allreals": "all", "allrealnumbers": "all", "realnumbers": "all", "anyrealnumber": "all",
    "nosolution": "points", "nosolutions": "points", "norealsolution": "points", "norealsolutions": "points",
    "emptyset": "points", "theemptyset": "points",
}  # fmt: skip


@lru_cache(maxsize=1024)
def readings(text: str) -> tuple[Answer, ...]:
    """Every way in which a text in normal spelling may be read, the likeliest first."""
    if len(text) > MAX_CHARACTERS:
        return (Words(text),)
    found: list[Answer] = []
    for each in dict.fromkeys((with_joined_groups(text), text)):
        for variant in _by_signs(each):
            found += variant
    return tuple(dict.fromkeys(found))


def _by_signs(text: str) -> list[list[Answer]]:
    r"""The readings of a text, in which each `\pm` is both signs."""
    signs = re.findall(r"\\(?:pm|mp)(?![A-Za-z])", text)
    if not signs:
        return [_read(text)]
    if len(signs) > MAX_SIGNS:
        return [[Words(text)]]
    together = [_with_signs(text, [sign * (1 if each == r"\pm" else -1) for each in signs]) for sign in (1, -1)]
    found: list[list[Answer]] = [[Items("list", tuple(_first(each) for each in together))]]
    if len(signs) > 1 and r"\mp" not in signs:
        apart = [[1 if choice >> place & 1 else -1 for place in range(len(signs))] for choice in range(2 ** len(signs))]
        found.append([Items("list", tuple(_first(_with_signs(text, choice)) for choice in apart))])
    return found


def _with_signs(text: str, signs: list[int]) -> str:
    chosen = iter(signs)
    text = re.sub(r"\\(?:pm|mp)(?![A-Za-z])", lambda _: " + " if next(chosen) > 0 else " - ", text)
    return trimmed(text)


def _first(text: str) -> Answer:
    return _read(trimmed(text))[0]


def _read(text: str) -> list[Answer]:
    """The readings of a text without signs of both kinds."""
    text = _unwrapped(text)
    if IMPLIES.search(text):
        text = trimmed(split_at(text, IMPLIES)[0][-1])
    if match := SENTENCE.match(text):
        text = trimmed(text[match.end() :])
    if long := compound(text):
        return [long]
    if time := clock(text):
        return [time, *ratios(text)]
    if (match := MODULUS.search(text)) and not text[match.end() :].strip(" )"):
        return _congruence(text[: match.start()], match)
    alternatives, _ = split_at(text, OR)
    if len(alternatives) > 1 and any(
        re.search(r"[<>]|\\[lg]e(?![A-Za-z])|\\in(?![A-Za-z])", part) for part in alternatives
    ):
        return _union(alternatives)
    parts, _ = split_at(text, SEPARATOR)
    if 1 < len(parts) <= MAX_ITEMS and all(parts):
        return _several(text, parts)
    return _single(text)


def _several(text: str, parts: list[str]) -> list[Answer]:
    """Parts between commas, `and` and `or`: a list, or inequalities that hold together."""
    members = [_first(part) for part in parts]
    if all(isinstance(each, Region) and each.kind in ("where", "both", "minus") for each in members):
        return [Region("both", tuple(each for each in members if isinstance(each, Region)), _variable(members))]
    name, sides = "", split_at(parts[0], RELATION)
    if sides[1] in (["="], [r"\in"]) and is_name(sides[0][0]) and not any(isinstance(m, Equation) for m in members[1:]):
        name = sides[0][0]  # x = 2, 3
        members[0] = _first(sides[0][1])
    plain = [each for each in members if isinstance(each, Words)]
    if plain and not name and len(plain) < len(members):
        return [Words(words(text))]
    return [Items("list", tuple(members))]


def _variable(members: list[Answer]) -> str | None:
    return next((each.variable for each in members if isinstance(each, Region) and each.variable), None)


def _union(parts: list[str]) -> list[Answer]:
    members = [_first(part) for part in parts]
    if all(isinstance(each, Region) for each in members):
        return [Region("union", tuple(each for each in members if isinstance(each, Region)), _variable(members))]
    return [Words(words(" or ".join(parts)))]


def _unwrapped(text: str) -> str:
    """Without a pair of braces, or of marks of text, around the whole."""
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
        return _matrix(match[2])
    found: list[Answer] = [*amounts(text), *ratios(text)]
    return found or [Words(words(text), text)]


# ---- sets and brackets


def _sets(text: str) -> Region | None:
    """A named set, or one made of others."""
    if kind := NAMED_SETS.get(words(text)):
        return Region(kind, ())
    if re.fullmatch(r"\\emptyset\s*|⦃\s*⦄", text):
        return Region("points", ())
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
    if isinstance(answer, Items) and all(isinstance(each, Amount) for each in answer.items):
        values = [each.value for each in answer.items if isinstance(each, Amount)]
        if answer.kind in ("set", "list"):
            return Region("points", tuple(values))
        if len(values) == 2 and answer.kind in ("()", "[]", "(]", "[)"):
            return Region("interval", (*values, answer.kind))
    return None


def _bracketed(text: str) -> Answer | None:
    """Brackets around items."""
    if text[:1] not in ("(", "[", "⦃", "⟨") or text[-1:] not in (")", "]", "⦄", "⟩") or not _is_closed(text):
        return None
    kind, inner = text[0] + text[-1], trimmed(text[1:-1])
    parts, _ = split_at(inner, re.compile(r"\s*[,;]\s*"))
    if kind == "⦃⦄":
        described, bars = split_at(inner, re.compile(r"\||:"))
        if len(bars) == 1:
            return _first(described[1])  # { x | x > 3 }
        parts, _ = split_at(inner, SEPARATOR)
        return Items("set", tuple(_first(part) for part in parts))
    if not 1 < len(parts) <= MAX_ITEMS or not all(parts):
        return None
    found = Items(kind, tuple(_first(part) for part in parts))
    if len(parts) == 2 and (kind in ("(]", "[)") or r"\infty" in inner):
        return as_region(found)
    return found


def _matrix(inside: str) -> list[Answer]:
    rows = [split_at(row, re.compile("&"))[0] for row in split_at(trimmed(inside), re.compile(r"\\\\"))[0] if row]
    answers = tuple(tuple(_first(cell) for cell in row) for row in rows)
    return [Matrix(answers)]


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
        return [Equation(tuple(sides))] if len(sides) > 1 else _read(sides[0]) if sides else [Words("")]
    if r"\equiv" in relations or not all(sides):
        return [Words(words(" ".join(sides)))]
    try:
        nodes = [read_expression(side) for side in sides]
    except Unreadable:
        return [Words(squeezed("".join(side + sign for side, sign in zip(sides, [*relations, ""], strict=True))))]
    names = frozenset[str]().union(*map(symbols, nodes))
    if len(names) == 1:
        where = [
            Region("where", (nodes[place], relation, nodes[place + 1]), *names)
            for place, relation in enumerate(relations)
        ]
        return [where[0] if len(where) == 1 else Region("both", tuple(where), *names)]
    if len(relations) == 1 and relations[0] != r"\ne":
        low, high = nodes if relations[0] in ("<", r"\le") else nodes[::-1]
        return [Inequality(Node("add", (low, Node("minus", (high,)))), relations[0] in "<>")]
    return [Words(squeezed("".join(side + sign for side, sign in zip(sides, [*relations, ""], strict=True))))]


def is_name(text: str) -> bool:
    """Whether a side of an equation only names what the other one gives: `x`, `a_n`, `f(x)`, `P(A)`, `Area`."""
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
