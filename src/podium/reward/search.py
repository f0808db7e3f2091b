"""1 if the last `<finish>` or `<answer>` block equals the answer in SQuAD's normal form, else 0.

The answer is a text or a list of texts, any of which is right; the list may be written as JSON.
"""

from podium.records import Prompt, Rollout
from podium.reward.scoring.verifiers import (
    answer_within,
    declare_range,
    expected_texts_or_json,
    gold_answer,
    is_any_of,
    judges_answer,
    reads_answer,
    search_answer,
)


@gold_answer(answer_within("<answer>", "</answer>"))
@reads_answer(expected_texts_or_json)
@declare_range(0.0, 1.0)
@judges_answer
def search(prompt: Prompt, rollout: Rollout) -> float:
    """0 or 1."""
    found = search_answer(rollout.text)
    return float(found is not None and is_any_of(found, expected_texts_or_json(prompt.answer)))
