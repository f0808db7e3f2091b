"""The 25 instructions of IFEval, one function each: from a text and the instruction's kwargs to whether it is followed.

The rules are those of Google's `instruction_following_eval`, with their oddities (a keyword is a pattern, a text
without letters is in every language). Here each takes time in proportion to the text. `INSTRUCTIONS` has them by id.
Paper: https://arxiv.org/abs/2311.07911.
"""

import json
import re
import warnings
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from podium.reward.instructions.english import LANGUAGES, count_capital_words, count_sentences, language_of


def _known_language(code: str) -> str:
    if code not in LANGUAGES:
        raise ValueError(f"no language code; known: {' '.join(sorted(LANGUAGES))}")
    return code


Count = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1)]
Letter = Annotated[str, Field(pattern=r"^\S$")]
Language = Annotated[str, AfterValidator(_known_language)]
Relation = Literal["less than", "at least"]


def existence(text: str, *, keywords: Texts) -> bool:
    """Every keyword occurs."""
    return all(_pattern(keyword, re.escape(keyword)).search(text) for keyword in keywords)


def frequency(text: str, *, keyword: Text, frequency: Count, relation: Relation) -> bool:
    """The keyword occurs less than, or at least, that many times."""
    keyword = keyword.strip()
    return _holds(_count(_pattern(keyword, re.escape(keyword)), text), relation, frequency)


def forbidden_words(text: str, *, forbidden_words: Texts) -> bool:
    """None of the words occurs as a whole word."""
    return not any(_pattern(rf"\b{word}\b", rf"\b{re.escape(word)}\b").search(text) for word in forbidden_words)


def letter_frequency(text: str, *, letter: Letter, let_frequency: Count, let_relation: Relation) -> bool:
    """The letter, upper or lower case, occurs less than, or at least, that many times."""
    return _holds(text.lower().count(letter.lower()), let_relation, let_frequency)


def response_language(text: str, *, language: Language) -> bool:
    """The text is in the language, or its language cannot be detected."""
    return language_of(text) in (language, None)


def number_sentences(text: str, *, num_sentences: Count, relation: Relation) -> bool:
    return _holds(count_sentences(text), relation, num_sentences)


def number_paragraphs(text: str, *, num_paragraphs: Count) -> bool:
    """That many paragraphs, separated by `***`; only the first and the last part may be empty."""
    parts = [bool(part.strip()) for part in re.split(r"\s?\*\*\*\s?", text)]
    return all(parts[1:-1]) and sum(parts) == num_paragraphs


def number_words(text: str, *, num_words: Count, relation: Relation) -> bool:
    """Words are runs of letters, digits and underscores: "don't" is two."""
    return _holds(_count(re.compile(r"\w+"), text), relation, num_words)


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


def number_placeholders(text: str, *, num_placeholders: Count) -> bool:
    """At least that many `[…]`, each within one line."""
    return count_enclosed(text, "[", "]") >= num_placeholders


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


def constrained_response(text: str) -> bool:
    """One of IFEval's three answers occurs."""
    return any(f"My answer is {answer}." in text for answer in ("yes", "no", "maybe"))


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


def repeat_prompt(text: str, *, prompt_to_repeat: Text) -> bool:
    """The text begins with the request, in any case."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, *, end_phrase: Text) -> bool:
    """The text ends with the phrase, in any case; double quotes after it do not count."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def capital_word_frequency(text: str, *, capital_frequency: Count, capital_relation: Relation) -> bool:
    """Words in capitals occur less than, or at least, that many times."""
    return _holds(count_capital_words(text), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    """In capitals, and in English or in a language that cannot be detected."""
    return text.isupper() and language_of(text) in ("en", None)


def english_lowercase(text: str) -> bool:
    """In lower case, and in English or in a language that cannot be detected."""
    return text.islower() and language_of(text) in ("en", None)


def no_comma(text: str) -> bool:
    return "," not in text


def quotation(text: str) -> bool:
    """The whole text is in double quotes."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


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


def _pattern(pattern: str, literal: str, flags: re.RegexFlag | int = re.IGNORECASE) -> re.Pattern[str]:
    """IFEval uses the words of a label as patterns; words that are no pattern, such as `(note`, are taken literally."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # "possible nested set": the label's business
        try:
            return re.compile(pattern, flags)
        except re.error:
            return re.compile(literal, flags)


GROUPS: dict[str, list[Callable[..., bool]]] = {
    "keywords": [existence, frequency, forbidden_words, letter_frequency],
    "language": [response_language],
    "length_constraints": [number_sentences, number_paragraphs, number_words, nth_paragraph_first_word],
    "detectable_content": [number_placeholders, postscript],
    "detectable_format": [
        number_bullet_lists,
        constrained_response,
        number_highlighted_sections,
        multiple_sections,
        json_format,
        title,
    ],
    "combination": [two_responses, repeat_prompt],
    "startend": [end_checker, quotation],
    "change_case": [capital_word_frequency, english_capital, english_lowercase],
    "punctuation": [no_comma],
}
INSTRUCTIONS = {f"{group}:{check.__name__}": check for group, checks in GROUPS.items() for check in checks}
