"""The 25 functions of Tulu 3's instruction data, named as in the `func_name` of its labels.

The rules are those of open-instruct's `if_functions.py`. They look like IFEval's but differ: words are separated by
white space, counts are exact, case mostly matters. Paper: https://arxiv.org/abs/2411.15124.
"""

import re
from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from podium.reward.instructions.english import language_of
from podium.reward.instructions.ifeval import Count, Quantifier, Text, count_enclosed, is_json


def verify_letter_frequency(text: str, *, letter: Annotated[str, Field(min_length=1, max_length=1)], N: Count) -> bool:
    """The letter occurs exactly N times; case matters."""
    return text.count(letter) == N


def verify_paragraph_count(text: str, *, N: Count) -> bool:
    """Exactly N paragraphs with `* * *` between them, none of them empty."""
    parts = "\n".join(line.strip() for line in text.splitlines()).split("* * *")
    return len(parts) == N and all(part.strip() for part in parts)


def verify_sentence_constraint(text: str, *, N: Count, quantifier: Quantifier) -> bool:
    """A sentence ends at white space after `.`, `?` or `!`, but not after `e.g.` or `Mr.`; "around" is 1 off."""
    sentences = re.split(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=[.?!])\s", text)
    return _holds(len(sentences), quantifier, N, tolerance=1)


def validate_paragraphs(text: str, *, N: Count, first_word: Text, i: Annotated[int, Field(ge=1)]) -> bool:
    """Exactly N parts with an empty line between them, and the i-th begins with the word."""
    parts = text.split("\n\n")
    return len(parts) == N and parts[i - 1].strip().startswith(first_word)


def verify_postscript(text: str, *, postscript_marker: Text) -> bool:
    """The marker occurs, and something follows it."""
    _, found, tail = text.partition(postscript_marker)
    return len((found + tail).strip()) > len(postscript_marker)


def validate_two_responses(text: str) -> bool:
    """Two different texts with one `******` between them."""
    first, _, second = text.partition("******")
    return text.count("******") == 1 and first.strip() != second.strip()


def _tenth(wanted: int) -> int:
    return max(round(wanted * 0.1), 1)


def _holds(found: int, quantifier: str, wanted: int, tolerance: int) -> bool:
    if quantifier == "at least":
        return found >= wanted
    return found <= wanted if quantifier == "at most" else abs(found - wanted) <= tolerance


FUNCTIONS: dict[str, Callable[..., bool]] = {
    # In any case, also within a word.
    "verify_keywords": lambda text, keyword_list: all(each.lower() in text.lower() for each in keyword_list),
    # Exactly N times as a whole word, in any case.
    "verify_keyword_frequency": lambda text, word, N: re.findall(r"\b\w+\b", text.lower()).count(word.lower()) == N,
    # Not even within a word.
    "validate_forbidden_words": lambda text, forbidden_words: (
        not any(word.lower() in text.lower() for word in forbidden_words)
    ),
    "verify_letter_frequency": verify_letter_frequency,
    "validate_response_language": lambda text, language: language_of(text) == language,
    "verify_paragraph_count": verify_paragraph_count,
    # Words are separated by white space; "around" is 10 % more or fewer, at least 1.
    "validate_word_constraint": lambda text, N, quantifier: _holds(len(text.split()), quantifier, N, _tenth(N)),
    "verify_sentence_constraint": verify_sentence_constraint,
    "validate_paragraphs": validate_paragraphs,
    "verify_postscript": verify_postscript,
    # At least N `[…]`, each within one line.
    "validate_placeholders": lambda text, N: count_enclosed(text, "[", "]") >= N,
    # Exactly N lines that begin with `*` or `-`.
    "verify_bullet_points": lambda text, N: sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == N,
    "validate_title": lambda text: count_enclosed(text, "<<", ">>") > 0,
    "validate_choice": lambda text, options: any(option in text for option in options),
    # At least N `*…*`, each within one line; empty ones count, so `**bold**` is two.
    "validate_highlighted_sections": lambda text, N: count_enclosed(text, "*", "*") >= N,
    # At least N times the word and a number, in any case.
    "validate_sections": lambda text, N, section_splitter: (
        len(re.findall(re.escape(section_splitter) + r"\s?\d+", text, re.IGNORECASE)) >= N
    ),
    "validate_json_format": is_json,
    "validate_repeat_prompt": lambda text, original_prompt: text.startswith(original_prompt),
    "validate_two_responses": validate_two_responses,
    "validate_uppercase": lambda text: text == text.upper(),
    "validate_lowercase": lambda text: text == text.lower(),
    # Words of the letters A-Z in capitals; "around" is 10 % more or fewer, at least 1.
    "validate_frequency_capital_words": lambda text, N, quantifier: _holds(
        len(re.findall(r"\b[A-Z]+\b", text)), quantifier, N, _tenth(N)
    ),
    "validate_end": lambda text, end_phrase: text.endswith(end_phrase),
    # The text begins and ends with a double quote.
    "validate_quotation": lambda text: text.startswith('"') and text.endswith('"'),
    "validate_no_commas": lambda text: "," not in text,
}
