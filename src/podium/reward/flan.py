"""1 if the text after the last "The answer is:" equals the answer in SQuAD's normal form, else 0.

Without those words the score is 0. If `answer` is a list, any of its texts is right.
"""

from podium.records import Prompt, Rollout
from podium.reward.scoring.verifiers import (
    answer_within,
    declare_range,
    expected_texts,
    gold_answer,
    is_any_of,
    judges_answer,
    reads_answer,
)

MARKER = "The answer is:"


@gold_answer(answer_within("The answer is: "))
@reads_answer(expected_texts)
@declare_range(0.0, 1.0)
@judges_answer
def flan(prompt: Prompt, rollout: Rollout) -> float:
    """0 or 1."""
    _, marker, tail = rollout.text.rpartition(MARKER)
    return float(bool(marker) and is_any_of(tail, expected_texts(prompt.answer)))
