"""The 25 functions of Tulu 3's instruction data, named as in the `func_name` of its labels.

The rules are those of open-instruct's `if_functions.py`. They look like IFEval's but differ: words are separated by
white space, counts are exact, case mostly matters. Paper: https://arxiv.org/abs/2411.15124.
"""

import re
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field

from podium.reward.instructions.english import language_of
from podium.reward.instructions.ifeval import Count, Language, Text, Texts, count_enclosed, is_json

Quantifier = Literal["at least", "around", "at most"]


def verify_keywords(text: str, *, keyword_list: Texts) -> bool:
    """Every keyword occurs, in any case, also within a word."""
    return all(keyword.lower() in text.lower() for keyword in keyword_list)


def verify_keyword_frequency(text: str, *, word: Text, N: Count) -> bool:
    """The word occurs exactly N times as a whole word, in any case."""
    return re.findall(r"\b\w+\b", text.lower()).count(word.lower()) == N


def validate_forbidden_words(text: str, *, forbidden_words: Texts) -> bool:
    """None of the words occurs, in any case, not even within a word."""
    return not any(word.lower() in text.lower() for word in forbidden_words)


def verify_letter_frequency(text: str, *, letter: Annotated[str, Field(min_length=1, max_length=1)], N: Count) -> bool:
    """The letter occurs exactly N times; case matters."""
    return text.count(letter) == N


def validate_response_language(text: str, *, language: Language) -> bool:
    return language_of(text) == language


def verify_paragraph_count(text: str, *, N: Count) -> bool:
    """Exactly N paragraphs with `* * *` between them, none of them empty."""
    parts = "\n".join(line.strip() for line in text.splitlines()).split("* * *")
    return len(parts) == N and all(part.strip() for part in parts)


def validate_word_constraint(text: str, *, N: Count, quantifier: Quantifier) -> bool:
    """Words are separated by white space; "around" is 10 % more or fewer, at least 1."""
    return _holds(len(text.split()), quantifier, N, tolerance=_tenth(N))


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


def validate_placeholders(text: str, *, N: Count) -> bool:
    """At least N `[…]`, each within one line."""
    return count_enclosed(text, "[", "]") >= N


def verify_bullet_points(text: str, *, N: Count) -> bool:
    """Exactly N lines that begin with `*` or `-`."""
    return sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == N


def validate_title(text: str) -> bool:
    """A line has `<<…>>`."""
    return count_enclosed(text, "<<", ">>") > 0


def validate_choice(text: str, *, options: Texts) -> bool:
    """One of the options occurs."""
    return any(option in text for option in options)


def validate_highlighted_sections(text: str, *, N: Count) -> bool:
    """At least N `*…*`, each within one line; empty ones count, so `**bold**` is two."""
    return count_enclosed(text, "*", "*") >= N


def validate_sections(text: str, *, N: Count, section_splitter: Text) -> bool:
    """At least N times the word and a number, in any case."""
    return len(re.findall(re.escape(section_splitter) + r"\s?\d+", text, re.IGNORECASE)) >= N


def validate_json_format(text: str) -> bool:
    return is_json(text)


def validate_repeat_prompt(text: str, *, original_prompt: Text) -> bool:
    """The text begins with the request."""
    return text.startswith(original_prompt)


def validate_two_responses(text: str) -> bool:
    """Two different texts with one `******` between them."""
    first, _, second = text.partition("******")
    return text.count("******") == 1 and first.strip() != second.strip()


def validate_uppercase(text: str) -> bool:
    """No letter is lower case."""
    return text == text.upper()


def validate_lowercase(text: str) -> bool:
    """No letter is upper case."""
    return text == text.lower()


def validate_frequency_capital_words(text: str, *, N: Count, quantifier: Quantifier) -> bool:
    """Words of the letters A-Z in capitals; "around" is 10 % more or fewer, at least 1."""
    return _holds(len(re.findall(r"\b[A-Z]+\b", text)), quantifier, N, tolerance=_tenth(N))


def validate_end(text: str, *, end_phrase: Text) -> bool:
    """The text ends with the phrase."""
    return text.endswith(end_phrase)


def validate_quotation(text: str) -> bool:
    """The text begins and ends with a double quote."""
    return text.startswith('"') and text.endswith('"')


def validate_no_commas(text: str) -> bool:
    return "," not in text


def _tenth(wanted: int) -> int:
    return max(round(wanted * 0.1), 1)


def _holds(found: int, quantifier: str, wanted: int, tolerance: int) -> bool:
    if quantifier == "at least":
        return found >= wanted
    return found <= wanted if quantifier == "at most" else abs(found - wanted) <= tolerance


FUNCTIONS: dict[str, Callable[..., bool]] = {
    name: function for name, function in globals().items() if name.startswith(("validate_", "verify_"))
}
