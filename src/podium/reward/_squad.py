"""Texts compared as SQuAD compares them: lower case, without punctuation and the articles a, an and the, white space
collapsed; by equality or by the F1 of their words. é is one letter, however Unicode composes it (NFC)."""

import re
import string
import unicodedata
from collections import Counter
from typing import Any

from podium.errors import InputError
from podium.records import Row


def normal_form(text: str) -> str:
    """A text that is nothing but an article, such as the choice "A", keeps it."""
    text = unicodedata.normalize("NFC", text).lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split()) or " ".join(text.split())


def word_f1(text: str, expected: str) -> float:
    """2 · shared words / all words of both, in normal form; a word counts as often as both texts have it."""
    words, wanted = Counter(normal_form(text).split()), Counter(normal_form(expected).split())
    shared = (words & wanted).total()
    return 2 * shared / (words.total() + wanted.total()) if shared else 0.0


def expected_texts(answer: Any) -> list[str]:
    """The answers that will do: one, or all of a list. An answer without a word in normal form is an `InputError`."""
    given = answer if isinstance(answer, list) else [answer]
    if not given:
        raise InputError("the list of answers is empty")
    for each in given:
        if not isinstance(each, (str, int, float)):
            raise InputError(f"the answer must be a text or a list of texts, not {each!r:.60}")
        if not normal_form(str(each)):
            raise InputError(f"the answer {each!r:.60} has nothing left to compare without its punctuation")
    return [str(each) for each in given]


def check(row: Row) -> None:
    """The row has an answer, or several, to compare with."""
    expected_texts(row.answer)
