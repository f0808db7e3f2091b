"""Sentences, words in capitals and the language of a text, for `ifeval`, as nltk and langdetect tell them."""

import re
from functools import lru_cache
from importlib.util import find_spec

from podium.errors import InputError
from podium.reward._punkt import sentences

APART = re.compile(r"[«“‘„`;@#$%&?!\u2012-\u2015]|\.{2,}|[:,](?!\d)")
APART_LATER = re.compile(r"[\"»”’*\[\](){}<>]|''|--")
"""Signs that stand for themselves, before and after single quotes are looked at; every dash but the hyphen is one."""
FINAL_STOP = re.compile(r"(?<=[^.])\.(?=[\])}>\"'»”’ ]*$)")
QUOTED = re.compile(r"(?i)(?<!\w)'(?!(?:re|ve|ll|m|t|s|d|n)\b)(?=\w)")
SUFFIXES = (re.compile(r"(?<=[^' ])(?='[sSmMdD]? )"), re.compile(r"(?<=[^' ])(?=(?:'(?:ll|LL|re|RE|ve|VE)|n't|N'T) )"))
"""Where IT'S and DON'T are cut; one after the other."""
TWO_WORDS = re.compile(
    r"(?i)\b(?:can(?=not\b)|d(?='ye\b)|gim(?=me\b)|gon(?=na\b)|got(?=ta\b)|lem(?=me\b)|more(?='n\b)|wan(?=na\s))"
    r"(not|'ye|me|na|ta|'n)"
)
"""Written as one, counted as two."""
SHORT = 100
"""Characters of a sentence whose count is kept: some texts say the same thing again and again."""


def count_sentences(text: str) -> int:
    """How many sentences the text has."""
    return sum(1 for _ in sentences(text))


def count_capital_words(text: str) -> int:
    """Words without a small letter, by the Penn Treebank's division: DON'T is DO and N'T, CANNOT is CAN and NOT."""
    count = _count_capitals
    return sum(count(each) if len(each) <= SHORT else count.__wrapped__(each) for each in sentences(text))


@lru_cache(maxsize=4096)
def _count_capitals(sentence: str) -> int:
    if sentence == sentence.lower():
        return 0
    words = FINAL_STOP.sub(" ", QUOTED.sub("' ", sentence.rstrip()))
    words = APART.sub(r" \g<0> ", words)
    words = APART_LATER.sub(r" \g<0> ", re.sub(r"(?<=[^'])(?=' )", " ", words))
    words = f" {' '.join(words.split())} "
    for suffix in SUFFIXES:
        words = suffix.sub(" ", words)
    words = TWO_WORDS.sub(lambda both: f" {both[0].removesuffix(both[1])} {both[1]} ", words)
    return sum(map(str.isupper, words.split()))


LANGUAGES = frozenset(
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr ne nl no pa pl pt ro "  # noqa: SIM905
    "ru sk sl so sq sv sw ta te th tl tr uk ur vi zh-cn zh-tw".split()
)
"""What langdetect can tell apart."""

MAX_CHARACTERS = 100_000
"""langdetect looks at the first 10,000 itself, but searches all of a text for addresses."""


def language_of(text: str) -> str | None:
    """The code of the text's language, always the same for the same text; None where there is nothing to tell by."""
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0
    try:
        return detect(text[:MAX_CHARACTERS])
    except LangDetectException:
        return None


def require_langdetect() -> None:
    """An `InputError` where the package that tells languages is missing."""
    if find_spec("langdetect") is None:
        raise InputError("telling languages needs langdetect: pip install 'podium-rl[ifeval]'")
