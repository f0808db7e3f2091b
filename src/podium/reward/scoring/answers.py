"""What most verifiers are: a comparison of the final answer with what the row expects."""

from collections.abc import Callable
from typing import Any

from podium.records import Prompt, Rollout
from podium.reward.scoring.verifiers import declare_range, gold_answer, judges_answer, reads_answer, runs_inline


def verifier(
    read: Callable[[Any], Any],
    *,
    gold: Callable[[Prompt], str | None] | None = None,
    highest: float = 1.0,
    inline: bool = False,
) -> Callable[[Callable[[str, Any], float]], Callable[..., float]]:
    """Decorator: turns `compare(text, expected)`, whose largest value is `highest`, into a reward.

    `text` is the part of the rollout's text that is judged, and `expected` is what `read` returns for the row's answer.
    `read` raises an `InputError` for an answer that it cannot use. See `gold_answer` for `gold`, `runs_inline` for
    `inline`.
    """

    def decorate(compare: Callable[[str, Any], float]) -> Callable[..., float]:
        def reward(prompt: Prompt, rollout: Rollout) -> float:
            return float(compare(rollout.text, read(prompt.answer)))

        reward.__module__, reward.__name__, reward.__doc__ = compare.__module__, compare.__name__, compare.__doc__
        found = reads_answer(read)(declare_range(0.0, highest)(judges_answer(reward)))
        found = gold_answer(gold)(found) if gold else found
        return runs_inline(found) if inline else found

    return decorate
