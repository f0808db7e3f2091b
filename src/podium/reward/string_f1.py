"""F1 between the words of the text and of the answer, in SQuAD's normal form; the best of several answers.

`<answer>` tags do not count. F1 is twice the shared words over all words of both.
"""

from podium.records import Prompt, Rollout
from podium.reward.scoring.verifiers import (
    declare_range,
    expected_texts,
    judges_answer,
    reads_answer,
    without_answer_tags,
    word_f1,
)


@reads_answer(expected_texts)
@declare_range(0.0, 1.0)
@judges_answer
def string_f1(prompt: Prompt, rollout: Rollout) -> float:
    """0 … 1."""
    text = without_answer_tags(rollout.text)
    return max(word_f1(text, expected) for expected in expected_texts(prompt.answer))
