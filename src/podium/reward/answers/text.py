"""Which part of a rollout's text is judged, and how texts are compared.

Thinking never counts. The answer is the text after the last `</think>`, or after the last closing tag of another style
in `podium.model.chat.STYLES`. A text that ends inside its thinking (the text or its prompt opens the thinking and
no closing tag follows) has no answer and scores 0. With the option `thinking = "count"` the whole text is judged.

Texts are compared in SQuAD's normal form, by equality or by the F1 of their words: lower case, without punctuation and
the articles a, an and the, white space collapsed. é is one letter, however Unicode composes it (NFC).
"""

import inspect
import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from podium.errors import InputError
from podium.model.chat import after_thinking
from podium.records import Prompt, Rollout

F = TypeVar("F", bound=Callable[..., float])
Thinking = Annotated[
    Literal["ignore", "count"],
    Field(description='"ignore": only what follows the thinking is judged; "count": the whole text'),
]
OPTION = inspect.Parameter("thinking", inspect.Parameter.KEYWORD_ONLY, default="ignore", annotation=Thinking)


def final_answer(prompt: Prompt, rollout: Rollout, thinking: Thinking = "ignore") -> str | None:
    """The part of the text that is judged; None if the text ends inside its thinking."""
    return rollout.text if thinking == "count" else after_thinking(rollout.text, prompt.opens_thinking)


def judges_answer(verifier: F) -> F:
    """Decorator: the verifier gets rollouts whose text is the final answer; a rollout without an answer scores 0.

    Adds the option `thinking`. Place it below the other decorators.
    """

    @wraps(verifier)
    def judge(prompt: Prompt, rollout: Rollout, *, thinking: Thinking = "ignore", **options: Any) -> float:
        answer = final_answer(prompt, rollout, thinking)
        return 0.0 if answer is None else verifier(prompt, replace(rollout, text=answer), **options)

    signature = inspect.signature(verifier, eval_str=True)
    judge.__signature__ = signature.replace(parameters=[*signature.parameters.values(), OPTION])  # type: ignore[attr-defined]
    return judge  # type: ignore[return-value]


def without_answer_tags(text: str) -> str:
    """The text without `<answer>` tags and surrounding white space."""
    return text.replace("<answer>", "").replace("</answer>", "").strip()


def last_block(text: str, *tags: str) -> str | None:
    """The content of the last closed block of any of the tags, in any case; None without a block."""
    opened: dict[str, int] = {}
    found = None
    for match in re.finditer(rf"<(/?)({'|'.join(tags)})>", text, re.IGNORECASE):
        tag = match[2].lower()
        if not match[1]:
            opened[tag] = match.end()
        elif tag in opened:
            found = opened.pop(tag), match.start()
    return text[slice(*found)] if found else None


def search_answer(text: str) -> str | None:
    """The content of the last `<finish>…</finish>` or `<answer>…</answer>`; None without a block that is not empty."""
    block = last_block(text, "finish", "answer")
    return block if block and block.strip() else None


def normal_form(text: str) -> str:
    """SQuAD's normal form. A text that is only an article, such as the choice "A", keeps it."""
    text = unicodedata.normalize("NFC", text).lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split()) or " ".join(text.split())


def is_any_of(text: str, expected: list[str]) -> bool:
    """Whether the text equals one of the expected texts in normal form."""
    return normal_form(text) in map(normal_form, expected)


def word_f1(text: str, expected: str) -> float:
    """2 · shared words / all words of both, in normal form; a word counts as often as both texts have it."""
    words, wanted = Counter(normal_form(text).split()), Counter(normal_form(expected).split())
    shared = (words & wanted).total()
    return 2 * shared / (words.total() + wanted.total()) if shared else 0.0


def expected_texts(answer: Any) -> list[str]:
    """The accepted answers: one, or all of a list. An answer without a word in normal form is an `InputError`."""
    given = answer if isinstance(answer, list) else [answer]
    if not given:
        raise InputError("the list of answers is empty")
    for each in given:
        if not isinstance(each, (str, int, float)):
            raise InputError(f"the answer must be a text or a list of texts, not {each!r:.60}")
        if not normal_form(str(each)):
            raise InputError(f"the answer {each!r:.60} has nothing left to compare without its punctuation")
    return [str(each) for each in given]


def expected_texts_or_json(answer: Any) -> list[str]:
    """As `expected_texts`; the list may be written as JSON: `'["Paris", "Paris, France"]'`."""
    if isinstance(answer, str) and answer.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):  # a text may happen to begin with a bracket
            answer = json.loads(answer)
    return expected_texts(answer)
