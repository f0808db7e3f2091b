"""Thinking never counts: the rule that every verifier of answers follows.

The answer is what follows the last `</think>`, or the last closing tag of another style that
`podium.model.thinking.STYLES` names. A text that ends inside the thinking (it begins with an opening tag, or its prompt
ends in one, and no closing tag follows) has no answer and scores 0. The option `thinking = "count"` of each such
verifier makes it judge the whole text.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from podium.model.thinking import after_thinking
from podium.records import Prompt, Rollout

F = TypeVar("F", bound=Callable[..., float])
Thinking = Annotated[
    Literal["ignore", "count"],
    Field(description='"ignore": only what follows the thinking is judged; "count": the whole text'),
]
OPTION = inspect.Parameter("thinking", inspect.Parameter.KEYWORD_ONLY, default="ignore", annotation=Thinking)


def final_answer(prompt: Prompt, rollout: Rollout, thinking: Thinking = "ignore") -> str | None:
    """The part of the text that is judged; None if the text ends before its thinking does."""
    return rollout.text if thinking == "count" else after_thinking(rollout.text, prompt.opens_thinking)


def judges_answer(verifier: F) -> F:
    """Decorator: the verifier gets rollouts whose text is the final answer; one without an answer scores 0.

    Adds the option `thinking`. It stands below the other decorators.
    """

    @wraps(verifier)
    def judge(prompt: Prompt, rollout: Rollout, *, thinking: Thinking = "ignore", **options: Any) -> float:
        answer = final_answer(prompt, rollout, thinking)
        return 0.0 if answer is None else verifier(prompt, replace(rollout, text=answer), **options)

    signature = inspect.signature(verifier, eval_str=True)
    judge.__signature__ = signature.replace(parameters=[*signature.parameters.values(), OPTION])  # type: ignore[attr-defined]
    return judge  # type: ignore[return-value]
