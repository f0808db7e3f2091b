"""Sentences, words in capitals and the language of a text, for `ifeval`.

IFEval counts sentences and words with nltk. Its Punkt model is a download, and a run that scores differently where a
file is missing is wrong in silence; so the same decisions are taken here by rule (docs/decisions.md says how near).
"""

import re
from importlib.util import find_spec

from podium.errors import InputError

ABBREVIATIONS = frozenset(
    "dr mr mrs ms prof st jr sr inc co corp ltd bros vs gen sen rep lt col maj adm messrs ave ft mg yr "  # noqa: SIM905
    "jan feb aug sep sept oct nov dec tues wed fri "
    "ala ariz calif colo conn fla ga ill ky mich minn nev okla ore pa tenn va wash wis ph.d".split()
)
"""Words whose full stop does not end a sentence, unless a sentence visibly begins after it."""

NOT_ABBREVIATIONS = ("e.g", "i.e")
"""Letters with full stops are abbreviations too (U.S., p.m.), but Punkt ends a sentence after these."""

STARTERS = frozenset(
    "the this these it he they i there in if when while since although though under some many most both but however "  # noqa: SIM905
    "so thus yet even".split()
)
"""Words that, with a capital, begin a sentence even after an abbreviation."""

SENTENCE_END = re.compile(r"[.?!](?=(?P<closing>[\"')\]}]*)(?:$|[)\"';}\]*:@({\[!?]))")
LONGEST_WORD = 20
"""No abbreviation is longer; a longer token is not read to its beginning."""


def count_sentences(text: str) -> int:
    """How many sentences the text has; at least 1 if it has anything but white space."""
    tokens = text.split()
    return bool(tokens) + sum(map(_breaks, tokens, [*tokens[1:], ""]))


def _breaks(token: str, following: str) -> int:
    """Sentences that begin within the token or with the one that follows it; `following` is empty at the end."""
    count = 0
    for match in SENTENCE_END.finditer(token):
        stop, after = match.start(), match.end("closing")
        before, rest = token[max(0, stop - LONGEST_WORD) : stop], token[after : after + LONGEST_WORD] or following
        count += bool(rest) and (match[0] != "." or _stop_ends(before, rest))
    return count


def _stop_ends(before: str, rest: str) -> bool:
    """Whether a full stop ends a sentence, by the characters before it and the word after it."""
    word, next_word = before.lstrip("\"'([{*“‘`_<").lower(), rest.lstrip("\"'([{*“‘`_<")
    begins = next_word[:1].isupper()
    if word.endswith("."):  # an ellipsis
        return begins
    if word in ABBREVIATIONS or (re.fullmatch(r"[a-z](?:\.[a-z])*", word) and word not in NOT_ABBREVIATIONS):
        return begins and next_word.rstrip(",;:").lower() in STARTERS
    if re.fullmatch(r"[0-9.,:/-]+", word):
        return not next_word[:1].islower()
    return True


SEPARATORS = re.compile(r"[\"“”‘’«»„\[\](){}<>;@#$%&?!–*`]|\.{2,}|--|[:,](?![0-9])")
SUFFIX = re.compile(r"(.+?)('[smdSMD]|'ll|'LL|'re|'RE|'ve|'VE|n't|N'T)")
TWO_WORDS = {"cannot": 3, "d'ye": 1, "gimme": 3, "gonna": 3, "gotta": 3, "lemme": 3, "wanna": 3}
"""Written as one, counted as two; the length of the first."""


def count_capital_words(text: str) -> int:
    """Words without a small letter, by the Penn Treebank's division: DON'T is DO and N'T, CANNOT is CAN and NOT."""
    return sum(_capitals(piece) for token in text.split() for piece in SEPARATORS.split(token))


def _capitals(piece: str) -> int:
    piece = piece.rstrip(".")
    suffix, first = SUFFIX.fullmatch(piece), TWO_WORDS.get(piece.lower())
    parts = [suffix[1], suffix[2]] if suffix else [piece[:first], piece[first:] if first else ""]
    return sum(part.isupper() for part in parts)


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
