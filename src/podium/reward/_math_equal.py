"""Whether two mathematical answers are the same: by their tidy text, else by math-verify.

math-verify's own time limits work by signals, which only the main thread may set; they are off, because the process
that runs a reward is timed from outside. What would make sympy compute for ever is kept away from it by its looks:
such answers are compared as text alone.
"""

import logging
import re
from functools import lru_cache
from typing import Any

from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from podium.reward._math_form import Form, is_known, squeezed, tidy, without_thousands

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off

READING = LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
    ),
)

# What sympy is given at most.
MAX_CHARACTERS = 400
MAX_NESTING = 12
MAX_FUNCTIONS = 6
MAX_LIST = 60
MAX_FACTORIAL = 999
MAX_EXPONENT = 9999
MAX_SYMBOLIC_EXPONENT = 30  # where letters are about
MAX_DEGREE = 6  # of an equation, which is solved
MAX_EXPANSION = 12  # exponents of brackets with letters or roots in them, all together

TRANSCENDENT = "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|lg|exp"
FUNCTIONS = TRANSCENDENT + "|sqrt|max|min|gcd|lcm|mod|det"
WORD = re.compile(rf"(?<![\\A-Za-z])(?!(?:{FUNCTIONS})(?![A-Za-z]))[A-Za-z]{{3,}}")
ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[A-Za-z]+\*?\}(?:\{[clr|]+\})?")
COSTLY = re.compile(r"\\(?:sum|prod|i*int|oint|lim|bigcup|bigcap)(?![A-Za-z])")
POWER = re.compile(r"\^\s*(\{(?:[^{}]|\{[^{}]*\})*\}|\(?-?[0-9]+|.?)", re.DOTALL)
BINOMIAL = re.compile(r"\\[dt]?binom(?!\s*(?:\{[0-9]{1,4}\}\s*\{[0-9]{1,4}\}|\{[a-z]\}\s*\{[a-z]\}))")
NUMERIC = re.compile(r"\\(?:frac|times|cdot)(?![A-Za-z])")
FUNCTION = re.compile(rf"(?:{FUNCTIONS})(?![A-Za-z])")
GROWING = re.compile(rf"(?:{TRANSCENDENT})(?![A-Za-z])")
LARGE = re.compile(r"(?<![0-9.])[0-9]{5}|[0-9]\s*[\^!]")
AMBIGUOUS = re.compile(r"(?<!_)[0-9]\s+[0-9]|[0-9]\s*_")
"""`1 2`, which math-verify adds up, and numbers in another base, whose base it drops."""


def same_answer(given: str, expected: str) -> bool:
    """Whether `given` is what `expected` is."""
    mine, wanted = tidy(given), tidy(expected)
    if not mine.text or _units_differ(mine, wanted):
        return False
    if squeezed(mine.whole) == squeezed(wanted.whole) or squeezed(mine.text) == squeezed(wanted.text):
        return True
    one, other = without_thousands(mine.text), without_thousands(wanted.text)
    if one.endswith("%") != other.endswith("%") and _equal(one.rstrip("%"), other.rstrip("%")):
        return True  # a label often leaves the sign out
    return _equal(one, other)


def _equal(given: str, expected: str) -> bool:
    """By math-verify, where both are for it."""
    if given == expected:
        return True
    both = given, expected
    if not all(map(_is_for_sympy, both)) or (any(map(GROWING.search, both)) and any(map(_is_large, both))):
        return False  # beside a logarithm sympy raises its base to a large number
    return verify(
        _parsed(expected),
        _parsed(given),
        float_rounding=max(_decimals(given), _decimals(expected)),
        allow_set_relation_comp=True,  # x < 3 is (-oo, 3)
        timeout_seconds=None,
    )


def _units_differ(one: Form, other: Form) -> bool:
    """Whether both have a known unit, and not the same."""
    return is_known(one.unit) and is_known(other.unit) and one.unit != other.unit


@lru_cache(maxsize=256)
def _parsed(text: str) -> list[Any]:
    """What math-verify makes of the text; a group's rollouts share their expected answer."""
    return parse(rf"\boxed{{{text}}}", [READING], fallback_mode="no_fallback", parsing_timeout=0)


def _decimals(text: str) -> int:
    """Decimal places that count: six, or four more than the zeros that a small number begins with."""
    zeros = [len(match[1]) for match in re.finditer(r"(?<![0-9])0?\.(0+)[1-9]", text)]
    return max([6, *(4 + count for count in zeros)])


def _is_for_sympy(text: str) -> bool:
    """Whether the text is mathematics, not words, and small enough to compute with."""
    plain = ENVIRONMENT.sub("", text)
    return (
        len(text) <= MAX_CHARACTERS
        and not any(each.search(plain) for each in (WORD, AMBIGUOUS, COSTLY, BINOMIAL))
        and text.count(",") <= MAX_LIST
        and len(FUNCTION.findall(text)) <= MAX_FUNCTIONS
        and _is_shallow(text)
        and _powers_are_small(text)
        and all(_is_small_factorial(text[: match.start()]) for match in re.finditer("!", text))
    )


def _is_large(text: str) -> bool:
    """Whether it has a large number, or is one by its powers."""
    return LARGE.search(text) is not None or ("^" in text and not _has_letters(text))


def _has_letters(text: str) -> bool:
    return re.search("[A-Za-z]", NUMERIC.sub("", text)) is not None


def _is_shallow(text: str) -> bool:
    """Brackets of each kind are closed and not nested too deeply."""
    depth = 0
    for mark in re.sub(r"\\[{}]", "", text):
        depth += (mark in "({[") - (mark in ")}]")
        if not 0 <= depth <= MAX_NESTING:
            return False
    return depth == 0


def _powers_are_small(text: str) -> bool:
    """No power to a power, no large exponent, and no long expansion."""
    largest, expansion = MAX_EXPONENT, 0
    if _has_letters(text):
        largest = MAX_SYMBOLIC_EXPONENT
    if re.search(r"[=<>]|\\[lgn]e(?![A-Za-z])", text):
        largest = MAX_DEGREE
    for match in POWER.finditer(text):
        exponent, before = match[1], text[: match.start()].rstrip()
        if re.search(r"[0-9)}]\s*\^|!", exponent) or re.search(r"\^\s*\{?[0-9]+\}?\s*\)$", before):
            return False
        size = max((int(number[:9]) for number in re.findall("[0-9]+", exponent)), default=1)
        if before.endswith((")", "}", "]")) and re.search("[A-Za-z!]", NUMERIC.sub("", before)):
            expansion += size
        if size > largest or expansion > MAX_EXPANSION:
            return False
    return True


def _is_small_factorial(before: str) -> bool:
    """Whether what stands before a `!` is a letter, a small number or a bracket with nothing large in it."""
    before = before.rstrip()
    if number := re.search(r"(\^\s*)?([0-9]+)$", before):
        return number[1] is None and int(number[2][:9]) <= MAX_FACTORIAL
    if before.endswith((")", "}")):
        return not re.search(r"[0-9]{3}|\^|!", before)
    return re.search(r"(?<![\\A-Za-z])[A-Za-z]$", before) is not None
