r"""1 if the answer that the text gives is mathematically the expected one, else 0.

The text's answer is its last `\boxed{…}`; else the text after the last "answer is", "correct option is", 答案是 or a
heading "Final Answer"; else the last formula (`$…$`); else the whole text. Without a box, only the last
`<answer>…</answer>` block is searched if there is one. Two answers are the same if their texts are the same apart from
layout and the spelling of signs, or if they are of one kind (amount, set, point, interval, equation, time, words) with
one value: `1/2` is `0.5`, `x = 5` is `5`, `\{1, 2\}` is `\{2, 1\}`, `50\%` is both `0.5` and `50`. math-verify decides
about notation that Podium does not read. The row's answer is a text or a number; of a text with a box, the box counts.
"""

import re
from typing import Any

from podium.errors import InputError
from podium.reward.math_answers import same_answer
from podium.reward.math_answers.spelling import normal
from podium.reward.scoring.verifiers import answer_as_text, answer_within, last_block, verifier

TAIL = 100_000
"""Only this many characters at the end of a text are searched."""

MAX_BOXES = 20
MAX_CHARACTERS = 1000
"""A longer text is no answer."""

BRACE = re.compile(
    r"(?P<brace>(?P<box>\\(?:boxed|fbox|framebox)\s*)?\{)|\}|(?P<bare>\\boxed(?![A-Za-z])\s*)|\\.", re.DOTALL
)
ANSWER_IS = re.compile(
    r"(?:\b(?:answer|(?:correct|right)\s+(?:option|choice))(?:\s+is\b|\s*:)|答案[是为:：])[\s:：*]*"
    r"|^[ \t#*]*+(?:final[ \t]+)?answer[ \t*]*+\n\s*+(?=[^\n]*+\s*+\Z)",  # a heading over the last line
    re.IGNORECASE | re.MULTILINE,
)
BARE_CONTENT = re.compile(
    r"(?=[-+−–.(\[\\0-9√π]|[A-Za-z](?![A-Za-z]))"
    r"(?:[^\s$\\{}]|\\[A-Za-z]+(?:\{[^{}\n]{0,99}\}){0,2}|\\[,!%$]|(?<=[0-9]) (?=\\text)){1,200}"
    r"(?<![.,;:!?*])"
)
DELIMITER = re.compile(r"\$\$?|\\.", re.DOTALL)
CLOSING = {"$": "$", "$$": "$$", r"\(": r"\)", r"\[": r"\]"}


def find_answer(text: str) -> str | None:
    """The last box; else the text after the last "answer is"; else the last formula; else the whole text.

    Without a box, only the last `<answer>…</answer>` block is searched if there is one.
    """
    text = text[-TAIL:]
    found = last_boxed(text)
    if found is None:
        text = (last_block(text, "answer") or "").strip() or text
        found = _after_answer_is(text)
    if found is None:
        found = next(reversed(_formulas(text)), text)
    return usable(found)


def usable(found: str | None) -> str | None:
    """The answer without surrounding white space; None if it is empty or too long."""
    found = (found or "").strip()
    return found if 0 < len(found) <= MAX_CHARACTERS else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}` that is closed, or the text after a `\boxed` without braces.

    Of nested boxes the innermost counts. Boxes separated only by a comma or `and` are one answer: a list.
    """
    text = text[-TAIL:]
    boxes = sorted(_boxes(text), key=lambda box: box[1])
    if not boxes:
        return None
    last = len(boxes) - 1
    while last and len(boxes) - last < MAX_BOXES and _joins(text[boxes[last - 1][2] : boxes[last][0]]):
        last -= 1
    return ", ".join(text[start:end].strip() for _, start, end in boxes[last:])


def _boxes(text: str) -> list[tuple[int, int, int]]:
    """Where each box begins, and where its content begins and ends."""
    opened: list[tuple[int | None, int]] = []  # for each open brace: where its box begins, and where its content does
    found = []
    for match in BRACE.finditer(text):
        if match[0] == "}":
            box, start = opened.pop() if opened else (None, 0)
            if box is not None:
                found.append((box, start, match.start()))
        elif match["brace"]:
            opened.append((match.start() if match["box"] else None, match.end()))
        elif match["bare"] and (bare := BARE_CONTENT.match(text, match.end())):
            found.append((match.start(), match.end(), bare.end()))
    return found


def _joins(between: str) -> bool:
    """Whether the text between two boxes makes a list of them."""
    return len(between) < 40 and re.sub(r"[\s${}]|\\(?:text|quad|,|;|\(|\))", "", between) in (",", "and", ",and")


def _after_answer_is(text: str) -> str | None:
    """The formula right after the last such words; else the rest of the sentence, or the last formula in that."""
    ends = [match.end() for match in ANSWER_IS.finditer(text)]
    if not ends:
        return None
    tail = text[ends[-1] : ends[-1] + 2 * MAX_CHARACTERS]
    if tail.startswith(tuple(CLOSING)) and (formulas := _formulas(tail)):
        return formulas[0]
    sentence = re.split(r"\n|\.(?:\s|$)|。", tail, maxsplit=1)[0].strip(" *")
    return next(reversed(_formulas(sentence)), sentence) or None


def _formulas(text: str) -> list[str]:
    r"""The content of each `$…$`, `$$…$$`, `\(…\)` and `\[…\]`; `\$` is a dollar, and a `$` ends on its line."""
    found, opened, start = [], "", 0
    for match in DELIMITER.finditer(text):
        mark, end = match[0], match.start()
        if opened and mark == CLOSING[opened] and not (mark == "$" and "\n" in text[start:end]):
            found.append(text[start:end])
            opened = ""
        elif mark in CLOSING:
            opened, start = mark, match.end()
    return found


def expected_answer(answer: Any) -> str:
    """The expected answer from a text or a number; of a text with a box, the content of the box."""
    text = answer_as_text(answer)
    boxed = last_boxed(text)
    found = usable(text if boxed is None else boxed)
    if found is None or not normal(found):
        raise InputError(f"the answer must have 1 to {MAX_CHARACTERS} characters, not {answer!r:.60}")
    return found


@verifier(expected_answer, gold=answer_within(r"The answer is \boxed{", "}"))
def math(text: str, expected: str) -> bool:
    """0 or 1."""
    found = find_answer(text)
    return found is not None and same_answer(found, expected)
