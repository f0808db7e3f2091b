"""math-verify, for notation that Podium's own parser does not read.

math-verify's own time limits work by signals, which only the main thread may set; they are off, because the process
that runs a reward is timed from outside. What would make sympy compute for ever is kept away from it by its looks.
"""

import logging
import re
from functools import lru_cache
from typing import Any

from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

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
MAX_EXPONENT = 12

FUNCTIONS = "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|lg|exp|sqrt|max|min|gcd|lcm|mod|det"
WORD = re.compile(rf"(?<![\\A-Za-z])(?!(?:{FUNCTIONS})(?![A-Za-z]))[A-Za-z]{{3,}}")
ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[A-Za-z]+\*?\}(?:\{[clr|]+\})?")
COSTLY = re.compile(r"\\(?:sum|prod|i*int|oint|lim|bigcup|bigcap|binom)(?![A-Za-z])|!|[0-9]{7}")
SLOPPY = re.compile(
    r"(?<!_)[0-9]\s+[0-9]|[0-9]\s*_|[=<>:~?⟪]|\\(?:equiv|pmod|bmod|approx|overline|underline)(?![A-Za-z])"
)
"""What math-verify reads in part only: it adds up `1 2`, drops the base of a number, and takes one side of `3 = 5`."""
SPELLING = {"⦃": r"\{", "⦄": r"\}", "°": r"^\circ ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ",
            "⌉": r"\rceil ", "⟨": r"\langle ", "⟩": r"\rangle ", "ℝ": r"\mathbb{R}"}  # fmt: skip


def verified(given: str, expected: str) -> bool:
    """Whether math-verify finds two texts in the spelling of `_math_form` equal, where both are for it."""
    if not _is_for_sympy(given) or not _is_for_sympy(expected):
        return False
    return verify(_parsed(expected), _parsed(given), timeout_seconds=None)


@lru_cache(maxsize=256)
def _parsed(text: str) -> list[Any]:
    """What math-verify makes of the text; a group's rollouts share their expected answer."""
    for mark, spelling in SPELLING.items():
        text = text.replace(mark, spelling)
    return parse(rf"\boxed{{{text}}}", [READING], fallback_mode="no_fallback", parsing_timeout=0)


def _is_for_sympy(text: str) -> bool:
    """Whether the text is mathematics, not words, and small enough to compute with."""
    plain = ENVIRONMENT.sub("", text)
    return (
        len(text) <= MAX_CHARACTERS
        and not any(each.search(plain) for each in (WORD, COSTLY, SLOPPY))
        and len(re.findall(rf"(?:{FUNCTIONS})(?![A-Za-z])", text)) <= MAX_FUNCTIONS
        and _is_shallow(text)
        and _powers_are_small(text)
    )


def _is_shallow(text: str) -> bool:
    """Brackets are closed and not nested too deeply."""
    depth = 0
    for mark in text:
        depth += (mark in "({[") - (mark in ")}]")
        if not 0 <= depth <= MAX_NESTING:
            return False
    return depth == 0


def _powers_are_small(text: str) -> bool:
    """No power to a power, and no large exponents."""
    exponents = re.findall(r"\^\s*(\{[^{}]*\}|\(?-?[0-9]+|.?)", text)
    sizes = [int(number[:9]) for exponent in exponents for number in re.findall("[0-9]+", exponent)]
    return sum(sizes) <= MAX_EXPONENT and not any("^" in exponent or "{" in exponent[1:] for exponent in exponents)
