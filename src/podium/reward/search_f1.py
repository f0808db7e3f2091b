"""F1 between the words of the last `<finish>` or `<answer>` block and of the answer; 0 without a block.

The answer is a text or a list of texts, of which the closest counts; the list may be written as JSON. `floor` is the
lowest score of a block that is not empty, so that a policy first learns to write one.
"""

from typing import Annotated

from pydantic import Field

from podium.records import Prompt, Rollout
from podium.reward.scoring.verifiers import (
    answer_within,
    declare_range,
    expected_texts_or_json,
    gold_answer,
    judges_answer,
    reads_answer,
    search_answer,
    word_f1,
)


@gold_answer(answer_within("<answer>", "</answer>"))
@reads_answer(expected_texts_or_json)
@declare_range(0.0, 1.0)
@judges_answer
def search_f1(
    prompt: Prompt,
    rollout: Rollout,
    *,
    floor: Annotated[float, Field(ge=0, lt=1, description="lowest score of a block that is not empty")] = 0.0,
) -> float:
    """0 … 1."""
    found = search_answer(rollout.text)
    if found is None:
        return 0.0
    return max(floor, *(word_f1(found, label) for label in expected_texts_or_json(prompt.answer)))
