r"""The tidy form of a mathematical answer: one spelling of each sign, no layout, its unit apart.

`\dfrac12\,\text{cm}` becomes `\frac{1}{2}` with the unit `cm`. It is still LaTeX, for math-verify to read.
"""

import re
from dataclasses import dataclass

SIGNS = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ",
        "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ", "ℝ": r"\mathbb{R}",
        "°": r"^\circ ", "θ": r"\theta ", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
        "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "\u00a0": " ", "~": " ", "\0": " ",
    }
)  # fmt: skip
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")

REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\\$|\$|(?<!\\)\\[()\[\]]", ""),  # dollars and the marks of formulas
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![A-Za-z])", ""),
        (r"(?<!\\)\\[,;:!]|\{,\}(?=[0-9])", lambda match: "," if match[0] == "{,}" else ""),
        (r"\\(?:quad|qquad)(?![A-Za-z])|(?<!\\)\\[ \n]", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(le|ge|ne)q(?![A-Za-z])", r"\\\1 "),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\%| ?\b[Pp]er ?cent\b", "%"),
        (r"(?<![\\A-Za-z])(pi|theta|sin|cos|tan|log|ln)(?![A-Za-z])", r"\\\1 "),
        (r"(?<=[0-9A-Za-z)}])\*\*(?=[0-9A-Za-z({-])", "^"),
        (r"√\s*([0-9]+|[a-z])", r"\\sqrt{\1}"),
        (r"√", "sqrt"),
        (r"[⁰¹²³⁴-⁹⁻]+", lambda match: "^{" + match[0].translate(SUPERSCRIPTS) + "}"),
        (r"\\frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"\\sqrt\s*([0-9a-z])", r"\\sqrt{\1}"),
        (r"([0-9])[eE]([+-]?[0-9]+)(?![0-9A-Za-z])", r"\1\\times 10^{\2}"),
        (r"([\^_])\s*\{\s*([0-9A-Za-z])\s*\}", r"\1\2"),
        (r"(?<![0-9.,({\[])([0-9]{1,3})((?: [0-9]{3})+)(?![0-9 ])", lambda match: match[0].replace(" ", "")),
        (r"(?<![0-9./])([0-9]+) +([0-9]+)/([0-9]+)(?![0-9])", r"\1\\frac{\2}{\3}"),  # 1 1/2
    ]
]
WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|mathsf|mbox|operatorname)\s*\{([^{}]*)\}"
)
THOUSANDS = re.compile(r"(?<![0-9.,({\[])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")

UNITS = {
    "mm": "millimeter, millimetre", "cm": "centimeter, centimetre", "m": "meter, metre", "km": "kilometer, kilometre",
    "in": "inch, inches", "ft": "foot, feet", "yd": "yard", "mi": "mile",
    "mg": "milligram", "g": "gram", "kg": "kilogram", "lb": "pound, lbs", "oz": "ounce",
    "ms": "millisecond", "s": "second, sec", "min": "minute", "h": "hour, hr", "day": "", "week": "", "month": "",
    "year": "yr",
    "ml": "milliliter, millilitre", "l": "liter, litre", "mph": "miles per hour",
    "km/h": "kilometers per hour, kilometres per hour, kmh, kph", "m/s": "meters per second, metres per second",
    "degree": "deg", "radian": "rad", "dollar": "usd", "cent": "", "euro": "",
}  # fmt: skip
"""Units that differ from each other, with their other names."""

KNOWN_UNITS = {name: unit for unit, names in UNITS.items() for name in [unit, *names.split(", ")] if name}
POWERS = {"square": "2", "sq": "2", "cubic": "3", "squared": "2", "cubed": "3"}
NO_UNITS = re.compile(r"\\|(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?\b|log|ln|exp|sqrt|pi\b|and\b|or\b")


@dataclass(frozen=True)
class Form:
    """A tidy answer."""

    whole: str
    text: str
    """Without its unit."""
    unit: str | None
    """A known unit such as `cm` or `m2`, an unknown one as it is written, or None."""


def tidy(answer: str) -> Form:
    """The form of an answer."""
    answer = answer.translate(SIGNS)
    for pattern, replacement in REWRITES:
        answer = pattern.sub(replacement, answer)
    whole = _trimmed(answer)
    quantity, unit = _without_unit(whole)
    return Form(_without_wrappers(whole), _without_wrappers(quantity), unit)


def squeezed(text: str) -> str:
    """For comparison as text: small letters, no white space but between digits; `(A)` is `A`."""
    text = re.sub(r"(?<![0-9])\s|\s(?![0-9])", "", text).lower()
    return re.sub(r"^\(([a-z])\)$", r"\1", text)


def _without_wrappers(text: str) -> str:
    r"""Words without their `\text{…}`, and commas for `and` and `or`."""
    while text != (unwrapped := WRAPPER.sub(r" \1 ", text)):
        text = unwrapped
    return _trimmed(re.sub(r"\s*,?\s*\b(?:and|or)\b\s*", ",", text))


def without_thousands(text: str) -> str:
    """1,234 as 1234."""
    return THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)


def _trimmed(text: str) -> str:
    """Without what may stand around an answer."""
    return re.sub(r"\s+", " ", text).lstrip(" ;:=*").rstrip(" .,;:=*")


PLAIN_UNIT = re.compile(r"(.*[0-9}])(\s*)(\^\s*\{?\s*\\circ\s*\}?|[A-Za-z][A-Za-z/ ]*)(?:\^\{?([23])\}?)?", re.DOTALL)
WRAPPED_UNIT = re.compile(
    r"(.*[0-9A-Za-z})])\s*\\(?:text|textrm|mathrm|mbox)\s*"
    r"\{\s*([A-Za-z][A-Za-z/ .]*)(?:\^([23]))?\}(?:\^\{?([23])\}?)?",
    re.DOTALL,
)


def _without_unit(text: str) -> tuple[str, str | None]:
    """The quantity, and its unit if it has one: known ones after anything, other words only after a number."""
    if match := WRAPPED_UNIT.fullmatch(text):
        quantity, unit = match[1], _unit(match[2], match[3] or match[4])
        return (quantity, unit) if is_known(unit) or quantity[-1] in "0123456789}" else (text, None)
    if (match := PLAIN_UNIT.fullmatch(text)) and not NO_UNITS.match(match[3].replace(r"\circ", "")):
        quantity, space, words, power = match.groups()
        if r"\circ" in words:
            return quantity, "degree"
        unit = _unit(words, power)
        is_word = re.match("[A-Za-z]{3}", words) is not None and words.count(" ") <= 2
        if (is_known(unit) and (space or len(words) > 1)) or (space and is_word):
            return quantity, unit
    return text, None


def is_known(unit: str | None) -> bool:
    """Whether the unit differs from others: `5 m` is not `5 km`, but `5 boys` may be `5 children`."""
    return unit is not None and unit.rstrip("23") in UNITS


def _unit(words: str, power: str | None) -> str:
    """One name for each unit: `square meters` and `m^2` are `m2`."""
    parts = words.lower().strip(" .").split()
    powers = [POWERS[part] for part in parts if part in POWERS]
    name = " ".join(part for part in parts if part not in POWERS)
    name = KNOWN_UNITS.get(name) or KNOWN_UNITS.get(name.removesuffix("s")) or name
    return name + (power or (powers[0] if powers else ""))
