r"""What verifiers are made of: declarations, the part of a text that is judged, texts and numbers compared.

A reward is a function of a prompt and a rollout. Decorators declare what its signature cannot say.

Thinking never counts. The answer is the text after the last `</think>`, or after the last closing tag of another style
in `podium.model.chat.STYLES`. A text that ends inside its thinking has no answer and scores 0. With the option
`thinking = "count"` the whole text is judged.
"""

import inspect
import json
import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import wraps
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from podium.errors import InputError
from podium.model.chat import after_thinking
from podium.records import Prompt, Rollout, Row

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

# ---- declarations


def _sets(**marks: Any) -> Callable[[F], F]:
    def mark(function: F) -> F:
        for name, value in marks.items():
            setattr(function, name, value)
        return function

    return mark


def declare_range(min_value: float, max_value: float) -> Callable[[F], F]:
    """Decorator: the smallest and the largest value that the reward can return. The largest means "correct"."""
    return _sets(min_value=min_value, max_value=max_value)


def runs_inline(function: F) -> F:
    """Decorator: the reward is quick and harmless on any text, so it needs no worker process and no time limit."""
    return _sets(runs_inline=True)(function)


def refuses(check: Callable[..., None]) -> Callable[[F], F]:
    """Decorator: `check(timeout_s, **options)` runs before the model loads and raises an `InputError` if the reward
    cannot run."""
    return _sets(refuse=check)


def checks_answer(check: Callable[[Row], object]) -> Callable[[F], F]:
    """Decorator: `check` raises an `InputError` if the reward cannot use the answer of a row.

    `check` sees every row before the run starts, so a label that no answer can match is an error and not a score of 0.
    """
    return _sets(check_answer=check)


def reads_answer(read: Callable[[Any], Any]) -> Callable[[F], F]:
    """Decorator: as `checks_answer`, for a reward that reads the answer of a row with `read`."""
    return checks_answer(lambda row: read(row.answer))


def gold_answer(write: Callable[[Prompt], str | None] | str) -> Callable[[F], F]:
    """Decorator for `podium check --rewards`: how a row's answer is written to earn the highest value.

    `write` is a function of the prompt that returns None if the row does not tell, or a text that says why no row can
    tell. Without this decorator the answer's own text is used.
    """
    return _sets(gold=write)


def answer_text(prompt: Prompt) -> str | None:
    """The answer as text, the first of several; None if it is neither a text nor a number."""
    answer = prompt.answer[0] if isinstance(prompt.answer, list) and prompt.answer else prompt.answer
    is_plain = isinstance(answer, (str, int, float)) and not isinstance(answer, bool)
    return str(answer) if is_plain else None


def answer_within(before: str, after: str = "") -> Callable[[Prompt], str | None]:
    """For `gold_answer`: the answer's text between two other texts."""
    return lambda prompt: None if (text := answer_text(prompt)) is None else f"{before}{text}{after}"


def register_reward(name: str) -> Callable[[C], C]:
    """Class decorator: the class is found as `path.py:name` or `module:name`, and by its own name.

    The class has `min_value` and `max_value`. If it has a `weight`, that is the default of the table's weight.
    """

    def mark(cls: C) -> C:
        low, high = getattr(cls, "min_value", math.nan), getattr(cls, "max_value", math.nan)
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise InputError(
                f"class {cls.__name__}: min_value = {low} and max_value = {high}; a registered reward needs both, as "
                "finite numbers with the smaller first"
            )
        cls.registered_name = name
        return cls

    return mark


_current: ContextVar[Counter[str] | None] = ContextVar("counts of the group being scored", default=None)


def count(name: str, amount: float = 1.0) -> None:
    """Adds to the step's metric `reward/NAME`, such as requests, tokens or cost. Has no effect in a worker."""
    counts = _current.get()
    if counts is not None:
        counts[name] += amount  # type: ignore[assignment]


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Collects the counts of the block and of the tasks started in it."""
    counts: Counter[str] = Counter()
    token = _current.set(counts)
    try:
        yield counts
    finally:
        _current.reset(token)


# ---- the part of a text that is judged

Thinking = Annotated[
    Literal["ignore", "count"],
    Field(description='"ignore": only what follows the thinking is judged; "count": the whole text'),
]
OPTION = inspect.Parameter("thinking", inspect.Parameter.KEYWORD_ONLY, default="ignore", annotation=Thinking)


def final_answer(prompt: Prompt, rollout: Rollout, thinking: Thinking = "ignore") -> str | None:
    """The part of the text that is judged; None if the text ends inside its thinking."""
    return rollout.text if thinking == "count" else after_thinking(rollout.text, prompt.opens_thinking)


def judges_answer(verifier: F) -> F:
    """Decorator: the verifier gets rollouts whose text is the final answer; a rollout without an answer scores 0.

    Adds the option `thinking`. Place it below the other decorators.
    """

    @wraps(verifier)
    def judge(prompt: Prompt, rollout: Rollout, *, thinking: Thinking = "ignore", **options: Any) -> float:
        answer = final_answer(prompt, rollout, thinking)
        return 0.0 if answer is None else verifier(prompt, replace(rollout, text=answer), **options)

    judge.__signature__ = inspect.Signature([*_parameters(verifier), OPTION])  # type: ignore[attr-defined]
    return judge  # type: ignore[return-value]


def verifier(
    read: Callable[[Any], Any],
    *,
    gold: Callable[[Prompt], str | None] | None = None,
    highest: float = 1.0,
    inline: bool = False,
) -> Callable[[Callable[..., float]], Callable[..., float]]:
    """Decorator: turns `compare(text, expected, *, …options)`, whose largest value is `highest`, into a reward.

    `text` is the part of the rollout's text that is judged, and `expected` is what `read` returns for the row's answer.
    `read` raises an `InputError` for an answer that it cannot use. See `gold_answer` for `gold`, `runs_inline` for
    `inline`.
    """

    def decorate(compare: Callable[..., float]) -> Callable[..., float]:
        def reward(prompt: Prompt, rollout: Rollout, **options: Any) -> float:
            return float(compare(rollout.text, read(prompt.answer), **options))

        (prompt, rollout, _), (_, _, *options) = (_parameters(each) for each in (reward, compare))
        reward.__signature__ = inspect.Signature([prompt, rollout, *options])  # type: ignore[attr-defined]
        reward.__module__, reward.__name__, reward.__doc__ = compare.__module__, compare.__name__, compare.__doc__
        found = reads_answer(read)(declare_range(0.0, highest)(judges_answer(reward)))
        found = gold_answer(gold)(found) if gold else found
        return runs_inline(found) if inline else found

    return decorate


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [*inspect.signature(function, eval_str=True).parameters.values()]


def without_answer_tags(text: str) -> str:
    """The text without `<answer>` tags and surrounding white space."""
    return text.replace("<answer>", "").replace("</answer>", "").strip()


def last_block(text: str, *tags: str) -> str | None:
    """The content of the last closed block of any of the tags, in any case; None without a block."""
    opened: dict[str, int] = {}
    found = None
    for match in re.finditer(rf"<(/?)({'|'.join(tags)})>", text, re.IGNORECASE):
        tag = match[2].lower()
        if not match[1]:
            opened[tag] = match.end()
        elif tag in opened:
            found = opened.pop(tag), match.start()
    return text[slice(*found)] if found else None


def search_answer(text: str) -> str | None:
    """The content of the last `<finish>…</finish>` or `<answer>…</answer>`; None without a block that is not empty."""
    block = last_block(text, "finish", "answer")
    return block if block and block.strip() else None


# ---- texts


def normal_form(text: str) -> str:
    """SQuAD's normal form: lower case, without punctuation and the articles a, an and the, white space collapsed.

    é is one letter, however Unicode composes it (NFC). A text that is only an article, such as the choice "A", keeps
    it.
    """
    text = unicodedata.normalize("NFC", text).lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split()) or " ".join(text.split())


def is_any_of(text: str, expected: list[str]) -> bool:
    """Whether the text equals one of the expected texts in normal form."""
    return normal_form(text) in map(normal_form, expected)


def word_f1(text: str, expected: str) -> float:
    """2 · shared words / all words of both, in normal form; a word counts as often as both texts have it."""
    words, wanted = Counter(normal_form(text).split()), Counter(normal_form(expected).split())
    shared = (words & wanted).total()
    return 2 * shared / (words.total() + wanted.total()) if shared else 0.0


def expected_texts(answer: Any) -> list[str]:
    """The accepted answers: one, or all of a list. An answer without a word in normal form is an `InputError`."""
    given = answer if isinstance(answer, list) else [answer]
    if not given:
        raise InputError("the list of answers is empty")
    for each in given:
        if not isinstance(each, (str, int, float)):
            raise InputError(f"the answer must be a text or a list of texts, not {each!r:.60}")
        if not normal_form(str(each)):
            raise InputError(f"the answer {each!r:.60} has nothing left to compare without its punctuation")
    return [str(each) for each in given]


def expected_texts_or_json(answer: Any) -> list[str]:
    """As `expected_texts`; the list may be written as JSON: `'["Paris", "Paris, France"]'`."""
    if isinstance(answer, str) and answer.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):  # a text may happen to begin with a bracket
            answer = json.loads(answer)
    return expected_texts(answer)


# ---- numbers, as people write them
#
# They are compared as text: no size of number can make a comparison slow. Only the digits 0-9 count, also in full
# width. Groups of three digits may be separated by a comma, `{,}`, a narrow space (`\,`), a space or an apostrophe:
# 18,000 is 18 000. `7/8` and `\frac{7}{8}` are one number, and so is 3 1/2. A minus, or a dash used as one, is part of
# a number unless it subtracts: 10-5 holds 10 and 5. A space may follow the minus after `=` and `is`, or if the text is
# only that number: `x = - 5`. The exponent or index of a letter is no number: 5 m^2 holds 5, and x_2 holds none.

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


def decimals_in(text: str) -> Iterator[str]:
    """The same without fractions: 36/2 holds 36 and 2, because a quotient is no computed integer."""
    for match in DECIMAL.finditer(_plain(text)):
        yield _signed(match, _decimal(match["plain"]))


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
    if word is None or "/" in number:
        return [number]
    places, digits = POWERS[word[1].lower()], number.removeprefix("-")
    whole, _, fraction = digits.partition(".")
    fraction = fraction.ljust(places, "0")
    in_full = _decimal(f"{whole}{fraction[:places]}.{fraction[places:]}")
    return [number, number.removesuffix(digits) + in_full]


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


def _plain(text: str) -> str:
    """The text with ASCII digits, without exponents and indices of letters, and without white space after a minus."""
    text = SCRIPT.sub("", text.translate(WIDE))
    return SPACED_MINUS.sub(lambda match: f"{match['before'] or ''} -", text)


def _values(match: re.Match[str]) -> Iterator[str]:
    """The values of one match: two if a whole number stands before a fraction that does not belong to it."""
    if match["plain"] is not None:
        yield _signed(match, _decimal(match["plain"]))
        return
    ones, above = match["whole"] or match["ones"], match["top"] or match["tops"] or match["above"]
    below = match["bottom"] or match["bottoms"] or match["below"]
    is_mixed = int(above) < int(below)
    if ones and not is_mixed:
        yield "-" * (match[0][0] in MINUS) + (ones.lstrip("0") or "0")  # 3 5/2 are two numbers
        yield _fraction(0, int(above), int(below))
    else:
        yield _signed(match, _fraction(int(ones or 0), int(above), int(below)))


def _signed(match: re.Match[str], value: str) -> str:
    return "-" + value if match[0][0] in MINUS and value != "0" else value


def _decimal(written: str) -> str:
    whole, _, fraction = re.sub("[^0-9.]", "", written).partition(".")
    value = whole.lstrip("0") or "0"
    return value + "." + fraction.rstrip("0") if fraction.strip("0") else value


def _fraction(ones: int, above: int, below: int) -> str:
    """A fraction in lowest terms, or a decimal if that is finite."""
    if below == 0:
        return f"{above}/0"  # equals no number
    value = ones + Fraction(above, below)
    with localcontext(prec=100):  # enough: above and below have at most 15 digits
        decimal = Decimal(value.numerator) / value.denominator
    return _decimal(f"{decimal:f}") if Fraction(decimal) == value else f"{value.numerator}/{value.denominator}"
