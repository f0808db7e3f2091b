"""The F1 of the words of the last `<finish>` or `<answer>` block and of the answer; 0 without a block.

The answer is a text or a list of texts, of which the nearest counts; the list may be written as JSON. `floor` is the
least that a filled block scores, so that a policy first learns to write one.
"""

from typing import Annotated

from pydantic import Field

from podium.records import Prompt, Rollout
from podium.reward._contract import answer_within, checks_answer, declare_range, gold_answer
from podium.reward._search import check, found_answer, labels
from podium.reward._squad import word_f1
from podium.reward._thinking import judges_answer


@gold_answer(answer_within("<answer>", "</answer>"))
@checks_answer(check)
@declare_range(0.0, 1.0)
@judges_answer
def search_f1(
    prompt: Prompt,
    rollout: Rollout,
    *,
    floor: Annotated[float, Field(ge=0, lt=1, description="the least that a filled block scores")] = 0.0,
) -> float:
    """0 … 1."""
    found = found_answer(rollout.text)
    if found is None:
        return 0.0
    return max(floor, *(word_f1(found, label) for label in labels(prompt.answer)))
