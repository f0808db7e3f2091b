"""1 if the text equals the answer in SQuAD's normal form, else 0.

Normal form: lower case, without punctuation and the articles a, an and the, white space collapsed. If `answer`
is a list, any of its texts is right.
"""

from podium.records import Prompt, Rollout
from podium.reward.scoring.verifiers import (
    declare_range,
    expected_texts,
    is_any_of,
    judges_answer,
    reads_answer,
    runs_inline,
)


@runs_inline
@reads_answer(expected_texts)
@declare_range(0.0, 1.0)
@judges_answer
def exact(prompt: Prompt, rollout: Rollout) -> float:
    """0 or 1."""
    return float(is_any_of(rollout.text, expected_texts(prompt.answer)))
