"""The 25 instructions of IFEval, one function each: from a text and the instruction's kwargs to whether it is followed.

The rules are those of Google's `instruction_following_eval`, with their oddities (a keyword is a pattern, a text
without letters is in every language). Here each takes time in proportion to the text. `INSTRUCTIONS` has them by id.
Paper: https://arxiv.org/abs/2311.07911.
"""

import json
import re
import warnings
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from podium.reward.instructions.english import LANGUAGES, count_capital_words, count_sentences, language_of


def _known_language(code: str) -> str:
    if code not in LANGUAGES:
        raise ValueError(f"no language code; known: {' '.join(sorted(LANGUAGES))}")
    return code


Count = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1)]
Quantifier = Literal["at least", "around", "at most"]
ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(("keywords", "forbidden_words", "keyword_list", "options"), Texts),
    **dict.fromkeys(("keyword", "word", "first_word", "end_phrase"), Text),
    **dict.fromkeys(("prompt_to_repeat", "original_prompt", "section_splitter"), Text),
    **dict.fromkeys(("frequency", "let_frequency", "capital_frequency", "num_sentences", "num_words"), Count),
    **dict.fromkeys(("num_placeholders", "N"), Count),
    **dict.fromkeys(("relation", "let_relation", "capital_relation"), Literal["less than", "at least"]),
    "quantifier": Quantifier,
    "letter": Annotated[str, Field(pattern=r"^\S$")],
    "language": Annotated[str, AfterValidator(_known_language)],
}
"""What an instruction's argument of this name must be if the instruction does not say it."""


def number_paragraphs(text: str, *, num_paragraphs: Count) -> bool:
    """That many paragraphs, separated by `***`; only the first and the last part may be empty."""
    parts = [bool(part.strip()) for part in re.split(r"\s?\*\*\*\s?", text)]
    return all(parts[1:-1]) and sum(parts) == num_paragraphs


def nth_paragraph_first_word(
    text: str,
    *,
    num_paragraphs: Count,
    nth_paragraph: Annotated[int, Field(ge=1)],
    first_word: Text,
) -> bool:
    """That many paragraphs, separated by empty lines; the n-th, counting empty ones, begins with the word."""
    paragraphs = text.split("\n\n")
    filled = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    if filled != num_paragraphs or nth_paragraph > filled or not (chosen := paragraphs[nth_paragraph - 1].split()):
        return False
    word = re.match(r"[^.,?!'\"]*", chosen[0].lstrip("'").lstrip('"'))
    return word is not None and word[0].lower() == first_word.lower()


def postscript(text: str, *, postscript_marker: Text) -> bool:
    """The marker occurs, in any case."""
    marker = postscript_marker.strip()
    known = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
    return _pattern(known.get(marker, marker.lower()), re.escape(marker.lower())).search(text.lower()) is not None


def number_bullet_lists(text: str, *, num_bullets: Count) -> bool:
    """Exactly that many lines that begin with `-`, or with `*` and something other than a second `*`."""
    stars = re.findall(r"^[^\S\n]*\*[^*].*$", text, re.MULTILINE)
    dashes = re.findall(r"^[^\S\n]*-", text, re.MULTILINE)
    return len(stars) + len(dashes) == num_bullets


def number_highlighted_sections(text: str, *, num_highlights: Count) -> bool:
    """At least that many `*…*`; one in `**…**` counts once. Empty ones do not count."""
    single = [found.strip("*").strip() for found in re.findall(r"\*[^\n*]*\*", text)]
    double = [found[2:-2].strip() for found in re.findall(r"\*\*[^\n*]*\*\*", text)]
    return sum(map(bool, single + double)) >= num_highlights


def multiple_sections(text: str, *, section_spliter: Text, num_sections: Count) -> bool:
    """At least that many sections, each of which begins with the word and a number."""
    word = section_spliter.strip()
    pattern = _pattern(word + r"\s?\d+", re.escape(word) + r"\s?\d+", flags=0)
    return _count(pattern, text) >= num_sections


def json_format(text: str) -> bool:
    """The whole text is JSON; ``` marks around it are allowed."""
    text = text.strip()
    for mark in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(mark)
    return is_json(text.removesuffix("```").strip())


def title(text: str) -> bool:
    """A line has a `<<title>>` that is not empty."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start:end].lstrip("<").rstrip(">").strip():
            return True
    return False


def two_responses(text: str) -> bool:
    """Two different answers, separated by `******`; the first and the last part may be empty."""
    parts = [part.strip() for part in text.split("******")]
    filled = [part for part in parts if part]
    return all(parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


def count_enclosed(text: str, opening: str, closing: str) -> int:
    """How many pairs of the two marks there are, each within a line; nothing need stand between them."""
    count = 0
    for line in text.split("\n"):
        end = 0
        while (start := line.find(opening, end)) >= 0 and (end := line.find(closing, start + len(opening))) >= 0:
            count, end = count + 1, end + len(closing)
    return count


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _holds(found: int, relation: str, wanted: int) -> bool:
    return found < wanted if relation == "less than" else found >= wanted


def _count(pattern: re.Pattern[str], text: str) -> int:
    return sum(1 for _ in pattern.finditer(text))


def _pattern(pattern: str, literal: str | None = None, flags: re.RegexFlag | int = re.IGNORECASE) -> re.Pattern[str]:
    """IFEval uses the words of a label as patterns; words that are no pattern, such as `(note`, are taken literally."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # "possible nested set": the label's business
        try:
            return re.compile(pattern, flags)
        except re.error:
            return re.compile(re.escape(pattern) if literal is None else literal, flags)


INSTRUCTIONS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(_pattern(each).search(text) for each in keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation: _holds(
        _count(_pattern(keyword.strip()), text), relation, frequency
    ),
    # None of the words occurs as a whole word.
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(_pattern(rf"\b{word}\b", rf"\b{re.escape(word)}\b").search(text) for word in forbidden_words)
    ),
    # Upper or lower case.
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: _holds(
        text.lower().count(letter.lower()), let_relation, let_frequency
    ),
    # Also if the language cannot be detected; so for capitals and lower case below.
    "language:response_language": lambda text, language: language_of(text) in (language, None),
    "length_constraints:number_sentences": lambda text, num_sentences, relation: _holds(
        count_sentences(text), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": number_paragraphs,
    # Words are runs of letters, digits and underscores: "don't" is two.
    "length_constraints:number_words": lambda text, num_words, relation: _holds(
        _count(re.compile(r"\w+"), text), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    # At least that many `[…]`, each within one line.
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        count_enclosed(text, "[", "]") >= num_placeholders
    ),
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    # One of IFEval's three answers occurs.
    "detectable_format:constrained_response": lambda text: any(
        f"My answer is {answer}." in text for answer in ("yes", "no", "maybe")
    ),
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    # The text begins with the request, in any case.
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    # In any case; double quotes after the phrase do not count.
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    # The whole text is in double quotes.
    "startend:quotation": lambda text: re.fullmatch(r'".*"', text.strip(), re.DOTALL) is not None,
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: _holds(
        count_capital_words(text), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda text: text.isupper() and language_of(text) in ("en", None),
    "change_case:english_lowercase": lambda text: text.islower() and language_of(text) in ("en", None),
    "punctuation:no_comma": lambda text: "," not in text,
}
