"""Where the answer to a mathematical question stands in a text.

Everything here takes time in proportion to the text, however braces and markers are strewn in it.
"""

import re

TAIL = 100_000
"""Characters at the end of a text that are searched for the answer."""

MAX_CHARACTERS = 1000
"""A longer answer is none."""

BRACE = re.compile(r"(?P<brace>(?P<box>\\(?:boxed|fbox)\s*)?\{)|\}|\\.", re.DOTALL)
ANSWER_IS = re.compile(r"\banswer(?:\s+is\b|\s*:)[\s:*]*", re.IGNORECASE)
DELIMITER = re.compile(r"\$\$?|\\.", re.DOTALL)
CLOSING = {"$": "$", "$$": "$$", r"\(": r"\)", r"\[": r"\]"}


def find_answer(text: str) -> str | None:
    """The last box; without one what follows the last "answer is"; then the last formula; then the whole text."""
    text = text[-TAIL:]
    found = last_boxed(text)
    if found is None:
        found = _after_answer_is(text)
    if found is None:
        found = next(reversed(_formulas(text)), text)
    return usable(found)


def usable(found: str | None) -> str | None:
    """The answer without the white space around it; None if it is empty or too long to be one."""
    found = (found or "").strip()
    return found if 0 < len(found) <= MAX_CHARACTERS else None


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{…}` that is closed; the innermost of nested ones."""
    text = text[-TAIL:]
    opened: list[tuple[bool, int]] = []  # for each open brace: whether it is a box's, and where its content begins
    found = None
    for match in BRACE.finditer(text):
        if match[0] == "}":
            is_box, start = opened.pop() if opened else (False, 0)
            if is_box and (found is None or start > found[0]):
                found = start, match.start()
        elif match["brace"]:
            opened.append((match["box"] is not None, match.end()))
    return text[slice(*found)] if found else None


def _after_answer_is(text: str) -> str | None:
    """The formula right after the last such words; else the rest of the sentence, or the last formula in that."""
    last = None
    for match in ANSWER_IS.finditer(text):
        last = match
    if last is None:
        return None
    tail = text[last.end() : last.end() + 2 * MAX_CHARACTERS]
    if tail.startswith(tuple(CLOSING)) and (formulas := _formulas(tail)):
        return formulas[0]
    sentence = re.split(r"\n|\.(?:\s|$)", tail, maxsplit=1)[0].strip(" *")
    return next(reversed(_formulas(sentence)), sentence) or None


def _formulas(text: str) -> list[str]:
    r"""What stands in each `$…$`, `$$…$$`, `\(…\)` and `\[…\]`; `\$` is a dollar, and a `$` ends on its line."""
    found, opened, start = [], "", 0
    for match in DELIMITER.finditer(text):
        mark, end = match[0], match.start()
        if opened and mark == CLOSING[opened] and not (mark == "$" and "\n" in text[start:end]):
            found.append(text[start:end])
            opened = ""
        elif mark in CLOSING:
            opened, start = mark, match.end()
    return found
