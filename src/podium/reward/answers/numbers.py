r"""Numbers as people write them, compared as text: no size of number can make a comparison slow.

Only the digits 0-9 count, also in full width. Groups of three digits may be separated by a comma, `{,}`, a narrow space
(`\,`), a space or an apostrophe: 18,000 is 18 000. `7/8` and `\frac{7}{8}` are one number, and so is 3 1/2. A minus, or
a dash used as one, is part of a number unless it subtracts: 10-5 holds 10 and 5. A space may follow the minus after `=`
and `is`, or if the text is only that number: `x = - 5`. The exponent or index of a letter is no number: 5 m^2 holds 5,
and x_2 holds none.
"""

import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

from podium.errors import InputError

MINUS = "-−–"
PART = r"(?:,\\!|\{,\}|\\[,;: ]|[ '’\u00a0\u2009\u202f~])"
GROUPED = rf"[0-9]{{1,3}}(?:,[0-9]{{3}})+(?![0-9])|[0-9]{{1,3}}(?:{PART}[0-9]{{3}})+(?![0-9])|[0-9]+"
SMALL = "[0-9]{1,15}"
SIGN = rf"(?:(?<![\w)])[{MINUS}+])?(?:\\?\$|[€£¥])?"  # and a currency
PLAIN = rf"(?P<plain>(?<![0-9])(?:{GROUPED})(?:\.[0-9]+)?|\.[0-9]+)"
LATEX_FRACTION = (
    rf"(?:(?<![0-9/.])(?P<whole>{SMALL})(?:[ ~]|\\[ ,])?)?\\[dtc]?frac\s*"
    rf"(?:\{{\s*(?P<top>{SMALL})\s*\}}\s*\{{\s*(?P<bottom>{SMALL})\s*\}}|(?P<tops>[0-9])(?P<bottoms>[0-9]))"
)
FRACTION = rf"(?:(?<![0-9/.])(?P<ones>{SMALL}) )?(?<![0-9/.,])(?P<above>{SMALL})/(?P<below>{SMALL})(?![0-9]|[/.,][0-9])"
NUMBER = re.compile(f"{SIGN}(?:{LATEX_FRACTION}|{FRACTION}|{PLAIN})")
DECIMAL = re.compile(SIGN + PLAIN)
WIDE = {0xFF00 + code - 0x20: code for code in range(0x21, 0x7F)}
"""The full-width forms of ASCII. NFKC would also make 2 of the exponent ²."""
SCRIPT = re.compile(rf"(?:(?<=[A-Za-z])|(?<=[A-Za-z]\}}))[\^_](?:\{{[^{{}}\n]{{0,40}}\}}|[{MINUS}]?[0-9]+)")
SPACED_MINUS = re.compile(
    rf"(?:(?P<before>(?:=|\bis)[ \t]*+[$*(]*+)|\A[\s$*]*+(?=.[ \t]++[$€£¥]?[0-9.,]++[\s$*]*+\Z))"
    rf"[{MINUS}][ \t]++(?=[0-9.$€£¥\\])"
)
POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
MANY = re.compile(rf"(?:\s|~|\\[, ])*(?:\\text\{{\s*)?({'|'.join(POWERS)})\b", re.IGNORECASE)


def numbers_in(text: str) -> Iterator[str]:
    """Every number of the text in its normal form: one spelling for each value."""
    for match in NUMBER.finditer(_plain(text)):
        yield from _values(match)


def _values(match: re.Match[str]) -> Iterator[str]:
    """The values of one match: two if a whole number stands before a fraction that does not belong to it."""
    value = _normal(match)
    is_negative = match[0][0] in MINUS
    if (ones := match["whole"] or match["ones"]) and not _is_mixed(match):
        yield "-" * is_negative + (ones.lstrip("0") or "0")  # 3 5/2 are two numbers
        is_negative = False
    yield "-" + value if is_negative and value != "0" else value


def decimals_in(text: str) -> Iterator[str]:
    """The same without fractions: 36/2 holds 36 and 2, because a quotient is no computed integer."""
    for match in DECIMAL.finditer(_plain(text)):
        value = _decimal(match["plain"])
        yield "-" + value if match[0][0] in MINUS and value != "0" else value


def _plain(text: str) -> str:
    """The text with ASCII digits, without exponents and indices of letters, and without white space after a minus."""
    text = SCRIPT.sub("", text.translate(WIDE))
    return SPACED_MINUS.sub(lambda match: f"{match['before'] or ''} -", text)


def _is_mixed(match: re.Match[str]) -> bool:
    """Whether a whole number and the fraction after it are one number: 3 1/2."""
    above, below = _terms(match)
    return above < below


def _terms(match: re.Match[str]) -> tuple[int, int]:
    above = match["top"] or match["tops"] or match["above"]
    return int(above), int(match["bottom"] or match["bottoms"] or match["below"])


def _normal(match: re.Match[str]) -> str:
    return _fraction(match) if match["plain"] is None else _decimal(match["plain"])


def _decimal(written: str) -> str:
    whole, _, fraction = re.sub("[^0-9.]", "", written).partition(".")
    value = whole.lstrip("0") or "0"
    return value + "." + fraction.rstrip("0") if fraction.strip("0") else value


def _fraction(match: re.Match[str]) -> str:
    """A fraction in lowest terms, or a decimal if that is finite."""
    above, below = _terms(match)
    if below == 0:
        return f"{above}/0"  # equals no number
    ones = int(match["whole"] or match["ones"] or 0) if _is_mixed(match) else 0
    value = ones + Fraction(above, below)
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    if rest > 1:
        return f"{value.numerator}/{value.denominator}"
    places = value.denominator.bit_length()
    digits = str(value.numerator * 10**places // value.denominator).rjust(places + 1, "0")
    whole, fraction = digits[:-places], digits[-places:].rstrip("0")
    return f"{whole}.{fraction}" if fraction else whole


def last_readings(text: str) -> list[str]:
    """The last number of the text in its normal form, and that number times the word after it: `1.5 million` is 1.5 and
    1500000. Empty if the text has no number."""
    text = _plain(text)
    last = None
    for match in NUMBER.finditer(text):
        last = match
    if last is None:
        return []
    *_, number = _values(last)
    word = MANY.match(text, last.end())
    return [number] if word is None or "/" in number else [number, _in_full(number, POWERS[word[1].lower()])]


def _in_full(number: str, places: int) -> str:
    """The number with its decimal point moved that many places to the right."""
    sign = "-" if number.startswith("-") else ""
    whole, _, fraction = number.removeprefix("-").partition(".")
    fraction = fraction.ljust(places, "0")
    return sign + _decimal(f"{whole}{fraction[:places]}.{fraction[places:]}")


def answer_as_text(answer: Any) -> str:
    """The text of an answer that is a text or a number; anything else is an `InputError`."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        return f"{Decimal(str(answer)):f}"  # 1e20 has no exponent here
    raise InputError(f"the answer must be a text or a number, not {answer!r:.60}")


def expected_integer(answer: Any) -> str:
    """The only number of an answer, an integer, in its normal form; anything else is an `InputError`."""
    found = list(decimals_in(answer_as_text(answer)))
    if len(found) != 1 or "." in found[0]:
        raise InputError(f"the answer must hold one integer, not {answer!r:.60}")
    return found[0]
