"""Every instruction of IFEval and every function of Tulu 3 with texts that follow it and texts that do not.

The expected verdicts follow from the published definitions, oddities included; each was worked out by hand.
"""

import json
import sys
from typing import Any

import pytest

from podium.errors import InputError
from podium.records import Row
from podium.reward.ifeval import ifeval
from podium.reward.instructions.english import count_capital_words, count_sentences, language_of
from podium.reward.instructions.ifeval import INSTRUCTIONS
from podium.reward.instructions.tulu3 import FUNCTIONS
from podium.reward.scoring.stage import declared_range
from tests.builders import make_prompt, make_rollout

ENGLISH = "The weather is nice today and we are going to the park with our friends."
GERMAN = "Das Wetter ist heute schön und wir gehen mit unseren Freunden in den Park."

IFEVAL: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    (
        "keywords:existence",
        {"keywords": ["kangaroo", "river"]},
        ["A Kangaroo by the river.", "riverside kangaroos"],  # case does not matter, nor do word ends
        ["A kangaroo.", "rive r kangaroo"],
    ),
    ("keywords:existence", {"keywords": ["(note"]}, ["a (NOTE)"], ["a note"]),  # no pattern: literal
    ("keywords:existence", {"keywords": ["a.c"]}, ["abc"], ["ac"]),  # a pattern: any character
    (
        "keywords:frequency",
        {"keyword": " cat ", "frequency": 2, "relation": "at least"},
        ["cat Cat", "catcat dog"],
        ["cat", "dog"],
    ),
    (
        "keywords:frequency",
        {"keyword": "cat", "frequency": 2, "relation": "less than"},
        ["cat", "dog"],
        ["cat cat", "concatenated cat"],
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["bad", "awful"]},
        ["A badge is good.", "unawful"],  # whole words only
        ["This is BAD.", "awful!"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "Q", "let_frequency": 2, "let_relation": "at least"},
        ["Quick quiz", "qq"],
        ["Quick", "none"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "!", "let_frequency": 1, "let_relation": "less than"},
        ["calm"],
        ["loud!"],
    ),
    ("language:response_language", {"language": "de"}, [GERMAN, "12345"], [ENGLISH]),  # no letters: followed
    ("language:response_language", {"language": "en"}, [ENGLISH], [GERMAN]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        ["One. Two. Three.", "Mr. Smith came. He sat! Why?"],
        ["One. Two.", "Mr. Smith came. He sat"],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "less than"},
        ["Only one here.", "Dr. Brown of the U.S. army"],
        ["One. Two."],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["one\n***\ntwo", "***\none\n***\ntwo\n***", "one *** two"],
        ["one\n\ntwo", "one\n***\n***\ntwo", "one *** two *** three"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 4, "relation": "at least"},
        ["one two three four", "it's two-fold"],  # it, s, two, fold
        ["one two three", "one — two — three"],
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["one two"], ["one two three"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Weather"},
        ["Hello.\n\nWeather is nice.", 'Hello.\n\n"weather, it', "a\n\nweather\n\n"],
        ["Weather.\n\nHello.", "Hello.\n\nThe weather", "Hello.\n\nWeather.\n\nBye.", "a\n\n\n\nweather"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["Dear [name], at [address]", "[] []", "[[a] [b]"],
        ["Dear [name]", "[a\n] [b]", "no ["],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye.\nP.S. Call me", "p. s. call", "so P.S."],
        ["Bye.", "PS call me"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ["P.P.S. more", "p. p. s more"],
        ["P.S. more"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "NB:"}, ["nb: more"], ["note"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* one\n* two", "- one\n  - two", "text\n* one\n\n- two\nend"],
        ["* one", "** one\n* two", "* one\n* two\n* three", "1. one\n2. two"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", "Well. My answer is maybe. Indeed."],
        ["My answer is yes", "yes", "my answer is no."],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*one* and *two*", "**one** and *two*", "*a*b*c*"],
        ["*one*", "**one**", "* *  ** **", "*one\ntwo*"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb", "Section1 Section2 Section3"],
        ["Section 1", "SECTION 1 SECTION 2", "Section A Section B"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1, 2]}', '```json\n{"a": 1}\n```', "5", '``` "text" ```'],
        ["{'a': 1}", "text", '{"a": 1} and more', "```json"],
    ),
    ("detectable_format:title", {}, ["<<Joy>>\ntext", "a <<b>> c"], ["<<>>", "<< >>", "<Joy>", "<<Joy\n>>"]),
    (
        "combination:two_responses",
        {},
        ["one******two", "******\none\n******\ntwo\n******"],
        ["one", "one******one", "one******two******three", "one************two"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write a poem."},
        ["Write a poem. Roses are red.", "  write a POEM. Yes"],
        ["Roses are red. Write a poem.", "Write a"],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "Any questions?"},
        ["Done. Any questions?", 'Done. "any QUESTIONS?"  '],
        ["Any questions? No.", "Done."],
    ),
    ("startend:quotation", {}, ['"Hello there."', ' "a" '], ['"', "Hello", '"Hello', "“Hello”"]),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["NASA and ESA", "DON'T", "I AM"],  # DO and N'T
        ["NASA", "Nasa and Esa"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        ["only ONE", "none"],
        ["ONE TWO"],
    ),
    ("change_case:english_capital", {}, [ENGLISH.upper()], [ENGLISH, GERMAN.upper(), "12345"]),
    ("change_case:english_lowercase", {}, [ENGLISH.lower()], [ENGLISH, GERMAN.lower(), "12345"]),
    ("punctuation:no_comma", {}, ["no comma; none"], ["one, two"]),
]

TULU3: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("verify_keywords", {"keyword_list": ["sun", "Sea"]}, ["The SUN by the sea", "sunny seaside"], ["The sun"]),
    (
        "verify_keyword_frequency",
        {"word": "Cat", "N": 2},
        ["cat CAT", "a cat, a cat. cats"],  # exactly, whole words
        ["cat", "cat cat cat"],
    ),
    ("validate_forbidden_words", {"forbidden_words": ["bad"]}, ["good"], ["BAD", "a badge"]),  # within words too
    ("verify_letter_frequency", {"letter": "l", "N": 3}, ["hello world"], ["heLlo world", "hell"]),
    ("validate_response_language", {"language": "en"}, [ENGLISH], [GERMAN, "12345"]),  # unlike IFEval
    (
        "verify_paragraph_count",
        {"N": 2},
        ["one\n* * *\ntwo", "  one  * * * two"],
        ["one\n***\ntwo", "one", "one\n* * *\n", "a\n* * *\nb\n* * *\nc"],
    ),
    ("validate_word_constraint", {"N": 3, "quantifier": "at least"}, ["a b c", "a b c d"], ["a b", "it's two-fold"]),
    ("validate_word_constraint", {"N": 3, "quantifier": "at most"}, ["a b c"], ["a b c d"]),
    (
        "validate_word_constraint",
        {"N": 20, "quantifier": "around"},  # 18 … 22
        ["w " * 18, "w " * 22],
        ["w " * 17, "w " * 23],
    ),
    ("verify_sentence_constraint", {"N": 2, "quantifier": "at least"}, ["One. Two!"], ["One.", "Mr. X", "e.g. this"]),
    ("verify_sentence_constraint", {"N": 1, "quantifier": "at most"}, ["One.", "Dr. Who?"], ["One? Two."]),
    (
        "verify_sentence_constraint",
        {"N": 3, "quantifier": "around"},  # 2 … 4
        ["A1. B2.", "One1. Two2. Three3. Four4."],
        ["One1.", "a1. b2. c3. d4. e5."],
    ),
    (
        "validate_paragraphs",
        {"N": 2, "first_word": "Two", "i": 2},
        ["One\n\nTwo and more", "One\n\n  Twofold"],
        ["Two\n\nOne", "One\n\ntwo", "One\n\nTwo\n\nThree"],
    ),
    ("verify_postscript", {"postscript_marker": "P.S."}, ["Bye. P.S. Call"], ["Bye.", "Bye. P.S.", "p.s. call"]),
    ("validate_placeholders", {"N": 2}, ["[a] [b]", "[] []"], ["[a]", "[a\n] [b"]),
    ("verify_bullet_points", {"N": 2}, ["* a\n- b", "** a\n  * b"], ["* a", "a * b\n* c", "* a\n* b\n* c"]),
    ("validate_title", {}, ["<<Joy>>", "<<>>"], ["<Joy>", "<<Joy\n>>"]),
    ("validate_choice", {"options": ["yes", "no"]}, ["yes", "I say no."], ["Yes", "maybe"]),
    ("validate_highlighted_sections", {"N": 2}, ["*a* *b*", "**a**"], ["*a*", "*a\n* b"]),
    (
        "validate_sections",
        {"N": 2, "section_splitter": "Part"},
        ["Part 1 a PART 2 b", "Part1 Part2 Part3"],
        ["Part 1", "Part A Part B"],
    ),
    ("validate_json_format", {}, ['{"a": 1}', "[]"], ["{a: 1}", '```json\n{"a": 1}\n```']),
    ("validate_repeat_prompt", {"original_prompt": "Say it."}, ["Say it. It."], ["say it. It.", "It. Say it."]),
    ("validate_two_responses", {}, ["one******two"], ["one", "one******one", "a******b******c"]),
    ("validate_uppercase", {}, ["LOUD 12!", GERMAN.upper()], ["Loud"]),
    ("validate_lowercase", {}, ["calm 12!"], ["Calm"]),
    ("validate_frequency_capital_words", {"N": 2, "quantifier": "at least"}, ["NASA ESA", "I AM"], ["NASA", "NASA1"]),
    ("validate_frequency_capital_words", {"N": 1, "quantifier": "at most"}, ["NASA", "none"], ["NASA ESA"]),
    (
        "validate_frequency_capital_words",
        {"N": 3, "quantifier": "around"},  # 2 … 4
        ["A B", "A B C D"],
        ["A", "A B C D E"],
    ),
    ("validate_end", {"end_phrase": "The end."}, ["It is. The end."], ["The end. No", "the end."]),
    ("validate_quotation", {}, ['"all of it"'], ['"half', "none"]),
    ("validate_no_commas", {}, ["none; here"], ["one, two"]),
]


def score(text: str, label: Any, **options: Any) -> float:
    return ifeval(make_prompt(answer=label), make_rollout(text), **options)


def ifeval_label(*pairs: tuple[str, dict[str, Any] | None]) -> dict[str, Any]:
    return {"instruction_id_list": [name for name, _ in pairs], "kwargs": [kwargs for _, kwargs in pairs]}


def cases(table: list[tuple[str, dict[str, Any], list[str], list[str]]]) -> list[Any]:
    return [
        pytest.param(name, arguments, text, expected, id=f"{name} {expected:.0f} {text[:30]!r}")
        for name, arguments, right, wrong in table
        for expected, texts in ((1.0, right), (0.0, wrong))
        for text in texts
    ]


def test_every_instruction_and_function_is_in_the_tables_and_there_are_25_of_each() -> None:
    assert {name for name, *_ in IFEVAL} == set(INSTRUCTIONS)
    assert {name for name, *_ in TULU3} == set(FUNCTIONS)
    assert len(INSTRUCTIONS) == len(FUNCTIONS) == 25


@pytest.mark.parametrize(("name", "kwargs", "text", "expected"), cases(IFEVAL))
def test_ifeval_instructions(name: str, kwargs: dict[str, Any], text: str, expected: float) -> None:
    assert score(text, ifeval_label((name, kwargs))) == expected


@pytest.mark.parametrize(("name", "arguments", "text", "expected"), cases(TULU3))
def test_tulu3_functions(name: str, arguments: dict[str, Any], text: str, expected: float) -> None:
    assert score(text, {"func_name": name, **arguments}) == expected


NO_COMMA = ("punctuation:no_comma", {})
TWO_WORDS = ("length_constraints:number_words", {"num_words": 2, "relation": "at least"})
LOWER = ("startend:end_checker", {"end_phrase": "end"})


def test_the_score_is_the_share_of_instructions_followed() -> None:
    label = ifeval_label(NO_COMMA, TWO_WORDS, LOWER)
    assert score("one two end", label) == 1.0
    assert score("one, two end", label) == pytest.approx(2 / 3)
    assert score("one", label) == pytest.approx(1 / 3)
    assert score("a,", label) == 0.0


def test_all_or_nothing() -> None:
    label = ifeval_label(NO_COMMA, TWO_WORDS)
    assert score("one two", label, all_or_nothing=True) == 1.0
    assert score("one, two", label, all_or_nothing=True) == 0.0


@pytest.mark.parametrize("text", ["", " \n", "<think>No commas here</think>", "<think>so</think>\n <answer></answer>"])
def test_an_empty_answer_follows_nothing(text: str) -> None:
    if "<answer>" not in text:
        assert score(text, ifeval_label(NO_COMMA)) == 0.0
    assert score(text, {"func_name": "validate_no_commas"}) == 0.0


def test_thinking_is_not_judged() -> None:
    assert score("<think>a, b, c</think>\n\nfine", ifeval_label(NO_COMMA)) == 1.0
    assert score("<think>fine</think>a, b", ifeval_label(NO_COMMA)) == 0.0
    assert score("<think>A, B</think>\n<answer>calm</answer>", {"func_name": "validate_lowercase"}) == 1.0


def test_both_forms_may_be_written_as_text_or_stand_in_a_list() -> None:
    label = {"instruction_id": ["punctuation:no_comma"], "kwargs": [None]}  # open-instruct's key
    for form in (label, json.dumps(label), [label], str([label]), [json.dumps(label)], json.dumps([label])):
        assert (score("a", form), score("a, b", form)) == (1.0, 0.0)
    nulls = {"func_name": "validate_end", "end_phrase": "x", "N": None, "quantifier": None}  # as the dataset has it
    for form in (nulls, json.dumps(nulls), str(nulls)):
        assert (score("ax", form), score("xa", form)) == (1.0, 0.0)
    assert score("calm, ", [{"func_name": "validate_lowercase"}, {"func_name": "validate_no_commas"}]) == 0.5


def test_a_row_of_the_published_data_needs_no_answer() -> None:
    """Its fields stand beside the prompt."""
    metadata = {"key": 1, **ifeval_label(NO_COMMA)}
    ifeval.check_answer(Row.from_text("?", metadata=metadata))
    prompt = make_prompt(answer=None, metadata=metadata)
    assert ifeval(prompt, make_rollout("a, b")) == 0.0
    assert ifeval(prompt, make_rollout("a b")) == 1.0


def test_numbers_may_be_floats_as_data_frames_make_them() -> None:
    assert score("a b", ifeval_label(("length_constraints:number_words", {"num_words": 2.0, "relation": "at least"})))


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        (None, "must have 'instruction_id_list' and 'kwargs' (IFEval) or 'func_name' (Tulu 3), not None"),
        (5, "must have 'instruction_id_list'"),
        ("18", "must have 'instruction_id_list'"),
        ("no label", "neither JSON nor a Python literal: 'no label'"),
        ("[" * 100_000, "neither JSON nor a Python literal"),
        ({}, "must have 'instruction_id_list'"),
        ([], "names no instruction"),
        (ifeval_label(), "names no instruction"),
        ({"instruction_id_list": "punctuation:no_comma", "kwargs": [{}]}, "must have 'instruction_id_list'"),
        (ifeval_label(("punctuation:no_coma", {})), "'punctuation:no_coma' is not known; known: keywords:existence, "),
        (ifeval_label(([], {})), "[] is not known"),  # type: ignore[arg-type]
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "1 instructions have 0 kwargs"),
        (ifeval_label(("punctuation:no_comma", [1])), "the arguments must be an object"),  # type: ignore[arg-type]
        (ifeval_label(("punctuation:no_comma", {"x": 1})), "no_comma: x: extra inputs are not permitted"),
        (ifeval_label(("length_constraints:number_words", {"num_words": 3})), "relation: field required"),
        (
            ifeval_label(("length_constraints:number_words", {"num_words": 3, "relation": None})),
            "relation: field requi",
        ),
        (ifeval_label(("length_constraints:number_words", {"num_words": -3, "relation": "at least"})), "num_words: "),
        (ifeval_label(("length_constraints:number_words", {"num_words": 3, "relation": "at most"})), "relation: "),
        (ifeval_label(("language:response_language", {"language": "English"})), "no language code; known: af ar"),
        (ifeval_label(("keywords:letter_frequency", {"letter": "ab"})), "letter: "),
        (ifeval_label(("keywords:existence", {"keywords": []})), "keywords: "),
        (
            ifeval_label(
                (
                    "length_constraints:nth_paragraph_first_word",
                    {"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "x"},
                )
            ),
            "nth_paragraph = 3 is more than num_paragraphs = 2",
        ),
        ({"func_name": "verify_nothing"}, "'verify_nothing' is not known; known: verify_keywords, "),
        ({"func_name": "validate_end"}, "validate_end: end_phrase: field required"),
        ({"func_name": "validate_choice", "options": "yes"}, "options: "),
        ({"func_name": "validate_paragraphs", "N": 2, "i": 3, "first_word": "x"}, "i = 3 is more than N = 2"),
        ({"func_name": "validate_response_language", "language": "xx"}, "no language code"),
    ],
)
def test_a_label_that_cannot_be_used_is_named_with_the_reason(label: Any, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        ifeval.check_answer(Row.from_text("?", answer=label))
    assert reason in str(caught.value)


def test_without_langdetect_a_label_that_needs_it_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langdetect", None)  # as if it were not installed
    for label in (ifeval_label(("change_case:english_capital", {})), TULU_LANGUAGE):
        with pytest.raises(InputError, match=r"needs langdetect: pip install 'podium-rl\[ifeval\]'"):
            ifeval.check_answer(Row.from_text("?", answer=label))
    ifeval.check_answer(Row.from_text("?", answer=ifeval_label(NO_COMMA)))


TULU_LANGUAGE = {"func_name": "validate_response_language", "language": "en"}


def test_the_language_of_a_text_is_always_the_same() -> None:
    """A text between two languages, which an unseeded detector calls one or the other."""
    assert len({language_of("no me la mano per una casa de vita") for _ in range(50)}) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        (" \n ", 0),
        ("no stop", 1),
        ("One. Two.", 2),
        ("one. two", 2),  # a small letter begins a sentence too
        ("Really?! Yes.", 2),  # several marks end one sentence
        ("Hooray!!!!!!!!!!!!!!!!!!!!", 2),  # Punkt's oddity: at the end of the text the last mark stands alone
        ("So... so... so.", 1),
        ("Mr. Smith and Dr. Who left.", 1),
        ("It was 5 p.m. The sun set.", 2),
        ("It was 5 p.m. on Monday.", 1),
        ("J. R. R. Tolkien wrote it.", 1),
        ("Pi is 3.14 and e is 2.72.", 1),
        ("1. apples", 1),
        ("1. Apples", 2),  # and so does the number of a list item, before a capital
        ("Wait... what?", 1),
        ("Wait... What?", 1),
        ("Wait... The end.", 2),  # the word often begins a sentence
        ('He said "Go." Then he left.', 2),
        ("See (it works!). Good.", 2),
        ("Visit example.com today.", 1),
    ],
)
def test_sentences(text: str, expected: int) -> None:
    assert count_sentences(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("NASA", 1),
        ("NASA'S", 2),
        ("CANNOT.", 2),
        ("I'll", 1),  # I and 'll
        ("A/B-C", 1),
        ("A,B", 2),
        ("COVID-19 in the U.S.", 2),
        ("(UN) “EU” [AU]", 3),
        ("Abc aBC 12", 0),
        ("R&D", 2),
        ("MORE'N A–B A—B A-B WANNA", 9),
    ],
)
def test_words_in_capitals(text: str, expected: int) -> None:
    assert count_capital_words(text) == expected


def test_its_range_is_declared() -> None:
    assert declared_range(ifeval) == (0.0, 1.0)
