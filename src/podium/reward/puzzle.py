"""1 if the text equals the answer in SQuAD's normal form, else 0.

`<answer>` tags do not count. If `answer` is a list, any of its texts is right.
"""

from podium.records import Prompt, Rollout
from podium.reward.scoring.verifiers import (
    declare_range,
    expected_texts,
    is_any_of,
    judges_answer,
    reads_answer,
    without_answer_tags,
)


@reads_answer(expected_texts)
@declare_range(0.0, 1.0)
@judges_answer
def puzzle(prompt: Prompt, rollout: Rollout) -> float:
    """0 or 1."""
    return float(is_any_of(without_answer_tags(rollout.text), expected_texts(prompt.answer)))
