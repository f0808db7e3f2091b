"""Sentences, words in capitals and the language of a text, for `ifeval`.

IFEval counts sentences with nltk 3 and its `punkt_tab` data. This module makes the same decisions without the package
and its download: Punkt (Kiss and Strunk 2006) with the English words that nltk's model has learned. These words are in
`punkt_english.txt`; its first line is the digest of the data that they come from. A mark (`.`, `?` or `!`) ends a
sentence unless it belongs to an abbreviation, an initial, a number or an ellipsis; then the next word decides.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Literal, NamedTuple

from podium.errors import InputError

SPACES = " \t\n\r\x0b\x0c"
QUOTES = "‘’“”«»"
APART = re.escape(")\";}]*:@'({[?!" + QUOTES)
"""Characters that are never part of a word."""
MANY = r"-{2,}|\.{2,}|(?:\.\s){2,}\."
OVER = rf"\s|$|[{APART}]|{MANY}"
TOKEN = re.compile(rf"{MANY}|[^\s(\"`{{\[:;&#*@)}}\]\-,]\S*?(?={OVER}|,(?:{OVER}))|\S")
MARK = re.compile(rf"[.?!](?=(?P<after>[{APART}]|\s+(?P<word>\S+)))")
CLOSING = re.compile(rf"[\"')\]}}{QUOTES}]+?(?:\s+|(?=--)|$)", re.MULTILINE)
"""Characters that belong to the sentence before them."""
NUMBER = re.compile(r"-?[.,]?\d[\d,.-]*\.?")
SHORT = 100
"""Longest text whose verdict is cached: the same few words occur again and again."""
NUMBER_TYPE = "##number##"

Kind = Literal["end", "abbreviation", "ellipsis"]


class Words(NamedTuple):
    """What the model knows about English words, in lower case."""

    abbreviations: frozenset[str]
    collocations: frozenset[str]
    """`a|b`: b continues the sentence after `a.`"""
    starters: frozenset[str]
    """Words that often begin a sentence."""
    lower: frozenset[str]
    """Seen in lower case, and capitalised only at the beginning of a sentence."""
    both: frozenset[str]
    """Seen in lower case and capitalised, also within a sentence."""
    begins_lower: frozenset[str]
    """Seen only in lower case, also at the beginning of a sentence."""


@lru_cache(maxsize=1)
def english() -> Words:
    lines = Path(__file__).with_name("punkt_english.txt").read_text(encoding="utf-8").splitlines()
    sections = (line.split("\t") for line in lines[1:])
    return Words(**{name: frozenset(words) for name, *words in sections})


def sentences(text: str) -> Iterator[str]:
    """The sentences of the text, with their closing quotes and brackets; none if the text is empty."""
    pieces = list(_pieces(text))
    skipped = 0
    for (start, end), following in zip_longest(pieces, pieces[1:]):
        start += skipped
        closing = CLOSING.match(text[slice(*following)]) if following else None
        skipped = closing.end() if closing else 0
        if closing:
            yield text[start : following[0] + len(closing[0].rstrip())]
        elif start < end:
            yield text[start:end]


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """Where each sentence begins and ends, before closing characters are moved to the sentence before them."""
    start = 0
    for mark, context in _contexts(text):
        if _has_end(context) if len(context) <= SHORT else _has_end.__wrapped__(context):
            yield start, mark.end()
            start = mark.start("word") if mark["word"] else mark.end()
    yield start, len(text.rstrip())


def _contexts(text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Each word with a mark at or near its end, and what follows it; of several marks in a word the last counts."""
    last: re.Match[str] | None = None
    begin = stop = 0
    for mark in MARK.finditer(text):
        space = max(text.rfind(sign, stop + 1, mark.start()) for sign in SPACES)
        start = space + 1 if space >= 0 else begin
        if last is not None and stop <= start:
            yield last, text[begin:stop] + last[0] + last["after"]
        begin, stop, last = start, mark.start(), mark
    if last is not None:
        yield last, text[begin:stop] + last[0] + last["after"]


@lru_cache(maxsize=4096)
def _has_end(context: str) -> bool:
    tokens = [token for line in context.split("\n") for token in TOKEN.findall(line)]
    return any(map(_ends, tokens, tokens[1:]))


def _kind(token: str) -> Kind | None:
    """The kind of a token, without its context."""
    if token in (".", "?", "!"):
        return "end"
    if not token.strip("."):
        return "ellipsis"
    if not token.endswith(".") or token.endswith(".."):
        return None
    word = token[:-1].lower()
    is_known = {word, word.rpartition("-")[2]} & english().abbreviations
    return "abbreviation" if is_known else "end"


def _ends(token: str, following: str) -> bool:
    """Whether a sentence ends with the token, given the token that follows."""
    kind = _kind(token)
    if not token.endswith("."):
        return kind == "end"
    word = _type(token, is_end=True)
    next_word = _type(following, is_end=_kind(following) == "end")
    if f"{word}|{next_word}" in english().collocations:
        return False
    is_initial = len(token) == 2 and (token[0].isalpha() or token[0] == "_")
    begins = _begins(following, next_word)
    if kind in ("abbreviation", "ellipsis") and not is_initial:
        if begins or (following[0].isupper() and next_word in english().starters):
            return True
    elif is_initial or word == NUMBER_TYPE:
        is_known = next_word in english().lower or next_word in english().both
        is_name = is_initial and following[0].isupper() and not is_known
        if begins is False or (begins is None and is_name):
            return False
    return kind == "end"


def _type(token: str, is_end: bool) -> str:
    """The word in lower case, without its full stop if that ends a sentence; all numbers are one word."""
    word = NUMBER_TYPE if NUMBER.fullmatch(token) else token.lower()
    return word[:-1] if is_end and len(word) > 1 and word.endswith(".") else word


def _begins(token: str, word: str) -> bool | None:
    """Whether a token begins a sentence, judged by the usual case of its word; None if that is not decisive."""
    if token in tuple(";:,.!?"):
        return False
    if token[0].isupper():
        return True if word in english().lower else None
    if token[0].islower():
        return None if word in english().begins_lower else False
    return None


SIGNS = re.compile(r"[«“‘„`;@#$%&?!\u2012-\u2015]|\.{2,}|[:,](?!\d)")
SIGNS_LATER = re.compile(r"[\"»”’*\[\](){}<>]|''|--")
"""Characters that are tokens of their own, split before and after single quotes; so is every dash but the hyphen."""
FINAL_STOP = re.compile(r"(?<=[^.])\.(?=[\])}>\"'»”’ ]*$)")
QUOTED = re.compile(r"(?i)(?<!\w)'(?!(?:re|ve|ll|m|t|s|d|n)\b)(?=\w)")
SUFFIXES = (re.compile(r"(?<=[^' ])(?='[sSmMdD]? )"), re.compile(r"(?<=[^' ])(?=(?:'(?:ll|LL|re|RE|ve|VE)|n't|N'T) )"))
"""Where IT'S and DON'T are split, in this order."""
TWO_WORDS = re.compile(
    r"(?i)\b(?:can(?=not\b)|d(?='ye\b)|gim(?=me\b)|gon(?=na\b)|got(?=ta\b)|lem(?=me\b)|more(?='n\b)|wan(?=na\s))"
    r"(not|'ye|me|na|ta|'n)"
)
"""Written as one, counted as two."""


def count_sentences(text: str) -> int:
    """How many sentences the text has."""
    return sum(1 for _ in sentences(text))


def count_capital_words(text: str) -> int:
    """Words in capitals, split as in the Penn Treebank: DON'T is DO and N'T, CANNOT is CAN and NOT."""
    count = _count_capitals
    return sum(count(each) if len(each) <= SHORT else count.__wrapped__(each) for each in sentences(text))


@lru_cache(maxsize=4096)
def _count_capitals(sentence: str) -> int:
    if sentence == sentence.lower():
        return 0
    words = FINAL_STOP.sub(" ", QUOTED.sub("' ", sentence.rstrip()))
    words = SIGNS.sub(r" \g<0> ", words)
    words = SIGNS_LATER.sub(r" \g<0> ", re.sub(r"(?<=[^'])(?=' )", " ", words))
    words = f" {' '.join(words.split())} "
    for suffix in SUFFIXES:
        words = suffix.sub(" ", words)
    words = TWO_WORDS.sub(lambda both: f" {both[0].removesuffix(both[1])} {both[1]} ", words)
    return sum(map(str.isupper, words.split()))


LANGUAGES = frozenset(
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt ro "  # noqa: SIM905
    "ru sk sl so sq sv sw ta te th tl tr uk ur vi zh-cn zh-tw".split()
)
"""The languages that langdetect knows."""

MAX_CHARACTERS = 100_000
"""langdetect uses only the first 10,000 characters but searches the whole text for addresses."""


def language_of(text: str) -> str | None:
    """The code of the text's language, always the same for the same text; None if it cannot be detected."""
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0
    try:
        return detect(text[:MAX_CHARACTERS])
    except LangDetectException:
        return None


def require_langdetect() -> None:
    """Raises `InputError` if the package that detects languages is missing."""
    if find_spec("langdetect") is None:
        raise InputError("detecting languages needs langdetect: pip install 'podium-rl[ifeval]'")
