"""Where sentences end, by Punkt (Kiss and Strunk 2006), with the English words that nltk's model has learned.

IFEval counts sentences with nltk 3 and its `punkt_tab` data. Here are the same decisions, without the package and its
download; `_punkt_english.txt` holds the words, and its first line the digest of the data that they are from. A mark
(`.`, `?` or `!`) ends a sentence unless it belongs to an abbreviation, an initial, a number or an ellipsis; after those
it depends on the word that follows.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Literal, NamedTuple

SPACES = " \t\n\r\x0b\x0c"
QUOTES = "‘’“”«»"
APART = re.escape(")\";}]*:@'({[?!" + QUOTES)
"""Signs that are never part of a word."""
MANY = r"-{2,}|\.{2,}|(?:\.\s){2,}\."
OVER = rf"\s|$|[{APART}]|{MANY}"
TOKEN = re.compile(rf"{MANY}|[^\s(\"`{{\[:;&#*@)}}\]\-,]\S*?(?={OVER}|,(?:{OVER}))|\S")
MARK = re.compile(rf"[.?!](?=(?P<after>[{APART}]|\s+(?P<word>\S+)))")
CLOSING = re.compile(rf"[\"')\]}}{QUOTES}]+?(?:\s+|(?=--)|$)", re.MULTILINE)
"""Signs that belong to the sentence before them."""
NUMBER = re.compile(r"-?[.,]?\d[\d,.-]*\.?")
SHORT = 100
"""Characters of a text whose verdict is kept: the same few words come again and again."""
NUMBER_TYPE = "##number##"

Kind = Literal["end", "abbreviation", "ellipsis"]


class Words(NamedTuple):
    """What the model knows of English, in small letters."""

    abbreviations: frozenset[str]
    collocations: frozenset[str]
    """`a|b`: b goes on with the sentence after `a.`"""
    starters: frozenset[str]
    """They often begin a sentence."""
    lower: frozenset[str]
    """Seen with a small letter, and with a large one only at the beginning of a sentence."""
    both: frozenset[str]
    """Seen with a small letter and with a large one, also within a sentence."""
    begins_lower: frozenset[str]
    """Seen with a small letter only, at the beginning of a sentence too."""


@lru_cache(maxsize=1)
def english() -> Words:
    lines = Path(__file__).with_name("_punkt_english.txt").read_text(encoding="utf-8").splitlines()
    sections = (line.split("\t") for line in lines[1:])
    return Words(**{name: frozenset(words) for name, *words in sections})


def sentences(text: str) -> Iterator[str]:
    """The sentences of the text, with the signs that close them; none if it is empty."""
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
    """Where each sentence begins and ends, before closing signs are given to the sentence before them."""
    start = 0
    for mark, context in _contexts(text):
        if _has_end(context) if len(context) <= SHORT else _has_end.__wrapped__(context):
            yield start, mark.end()
            start = mark.start("word") if mark["word"] else mark.end()
    yield start, len(text.rstrip())


def _contexts(text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Each word with a mark at or near its end, and what follows: of several marks in a word the last one counts."""
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
    """What a token is by itself."""
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
    """Whether a sentence ends with the token, if that follows it."""
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
    """The word without its case, and without its full stop if that ends a sentence; all numbers are one."""
    word = NUMBER_TYPE if NUMBER.fullmatch(token) else token.lower()
    return word[:-1] if is_end and len(word) > 1 and word.endswith(".") else word


def _begins(token: str, word: str) -> bool | None:
    """Whether a token begins a sentence, by how its word is written elsewhere; None if that does not tell."""
    if token in tuple(";:,.!?"):
        return False
    if token[0].isupper():
        return True if word in english().lower else None
    if token[0].islower():
        return None if word in english().begins_lower else False
    return None
