"""Amounts with units, times of day, ratios and words, read from texts in the spelling of `_math_form`."""

import re
from fractions import Fraction

from podium.reward._math_compare import is_constant
from podium.reward._math_form import split_at, squeezed, trimmed
from podium.reward._math_kinds import Amount, Answer, Clock, Ratio
from podium.reward._math_number import Node, Unreadable, number
from podium.reward._math_read import read_beginning, read_expression
from podium.reward._math_units import DEGREE, PERCENT, Unit, currency, number_in_words, read_suffix

CLOCK = re.compile(
    r"([01]?[0-9]|2[0-4])(?:\s*:\s*([0-5][0-9]))?\s*([ap])\.?\s?m\b\.?|([01]?[0-9]|2[0-4])\s*:\s*([0-5][0-9])", re.I
)
COLON = re.compile(r":|\s+to\s+")
SAME_WORDS = {"dne": "doesnotexist", "thelimitdoesnotexist": "doesnotexist", "t": "true", "f": "false"}


def amounts(text: str) -> list[Amount]:
    """An expression, perhaps with a currency before it or a unit behind it."""
    if match := re.fullmatch(r"([+-]?)\s*¤([A-Z]{3})\s*(.+)|(.+?)\s*¤([A-Z]{3})(.*)", text):
        code, rest = match[2] or match[5], trimmed(match[1] + match[3] if match[2] else match[4] + " " + match[6])
        return [Amount(each.value, tuple(_paid(code, unit) for unit in each.units)) for each in amounts(rest)]
    if text.endswith("%") and "%" not in text[:-1]:
        return [Amount(each.value, (PERCENT,)) for each in amounts(trimmed(text[:-1]))]
    if match := re.fullmatch(r"(.*[0-9)}])\s*°\s*⟪?([CF])⟫?", text):
        unit = Unit(frozenset([({"C": "celsius", "F": "fahrenheit"}[match[2]], 1)]))
        return [Amount(each.value, (unit,)) for each in amounts(match[1])]
    if number_and_rest := number_in_words(text.replace("⟪", " ").replace("⟫", " ")):
        value, rest = number_and_rest
        suffix = read_suffix(rest)
        return [Amount(number(value * suffix[0]), tuple(suffix[1]))] if suffix else []
    if re.fullmatch("[A-Za-z]{3,}", text):
        return []
    try:
        value, end = read_beginning(text)
    except (Unreadable, RecursionError):
        return []
    rest = text[end:].strip()
    if rest:
        suffix = read_suffix(rest)
        if suffix is None or (not is_constant(value) and any(unit is None or unit.things for unit in suffix[1])):
            return []
        return [Amount(_scaled(value, suffix[0]), tuple(suffix[1]))]
    angle = _degrees(value)
    return [Amount(value) if angle is None else Amount(angle, (DEGREE,)), *_letter_unit(text)]


def _degrees(node: Node) -> Node | None:
    """What stands before the sign of degrees, where that ends the expression."""
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


def compound(text: str) -> Amount | None:
    """`1 hour 30 minutes` or `5 ft 6 in` as one amount."""
    plain = re.sub(r"[⟪⟫{}]|\band\b|,", " ", text)
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\.?\s*", plain)
    if len(parts) < 2 or not re.fullmatch(r"\s*(?:[0-9]+(?:\.[0-9]+)?\s*[A-Za-z]+\.?\s*){2,4}", plain):
        return None
    read = [read_suffix(word) for _, word in parts]
    units = [suffix[1][0] for suffix in read if suffix is not None]
    first = units[0] if units else None
    if (
        len(units) < len(parts)
        or first is None
        or first.name not in ("length", "time", "month", "mass", "dollar", "angle")
    ):
        return None
    sizes = [unit.size for unit in units if unit is not None and unit.dimensions == first.dimensions]
    if len(sizes) < len(parts) or sizes != sorted(sizes, reverse=True) or len(set(sizes)) < len(sizes):
        return None
    total = sum(Fraction(value) * size for (value, _), size in zip(parts, sizes, strict=True))
    return Amount(number(total / sizes[0]), (first,))


def _letter_unit(text: str) -> list[Amount]:
    """`5 m` as a length: a product is likelier where no space stands between."""
    if match := re.fullmatch(r"(.*[0-9}])(\s*)([mgshlJNLW](?:/[hs])?(?:\^\{?[23]\}?)?)", text):
        suffix = read_suffix(match[3])
        try:
            value = read_expression(match[1])
        except Unreadable:
            return []
        if suffix and suffix[1] != [None] and not any(unit and unit.things for unit in suffix[1]):
            return [Amount(value, tuple(suffix[1]), needs_unit=not match[2])]
    return []


def _scaled(value: Node, factor: Fraction) -> Node:
    return value if factor == 1 else Node("times", (value, number(factor)))


def clock(text: str) -> Clock | None:
    match = CLOCK.fullmatch(re.sub("[⟪⟫]", " ", text).replace("{:}", ":").strip())
    if match is None:
        return None
    if match[3]:
        hour = int(match[1]) % 12 + (12 if match[3].lower() == "p" else 0)
        return Clock(60 * hour + int(match[2] or 0), True) if int(match[1]) <= 12 else None
    hour = int(match[4])
    return Clock(60 * hour + int(match[5]), hour > 12 or match[4].startswith("0"))


def ratios(text: str) -> list[Answer]:
    terms, signs = split_at(text, COLON)
    if not signs or not all(terms):
        return []
    try:
        return [Ratio(tuple(read_expression(term) for term in terms))]
    except Unreadable:
        return []


def words(text: str) -> str:
    """Words for comparison: small letters, no white space, no articles, no marks around them."""
    text = re.sub(r"[⟪⟫\"'`{}]|\\", " ", text).strip().lower()
    text = re.sub(r"^(?:[a-z]|it|this|that|he|she|they|the \w+)\s+(?:is|are|was)\s+(?!not\b)", "", text)
    text = re.sub(r"\b(?:a|an|the)\s+(?=\w)", "", text)
    text = squeezed(text.strip(" .,;:!"))
    text = re.sub(r"^\(([a-z]+)\)$", r"\1", text)
    return SAME_WORDS.get(text, text)
