"""The F1 of the words of the text and of the answer, in SQuAD's normal form; the best one of several answers.

`<answer>` tags do not count. F1 is twice the shared words over all words of both.
"""

from podium.records import Prompt, Rollout
from podium.reward._contract import checks_answer, declare_range
from podium.reward._markup import without_answer_tags
from podium.reward._squad import check, expected_texts, word_f1
from podium.reward._thinking import judges_answer


@checks_answer(check)
@declare_range(0.0, 1.0)
@judges_answer
def string_f1(prompt: Prompt, rollout: Rollout) -> float:
    """0 … 1."""
    text = without_answer_tags(rollout.text)
    return max(word_f1(text, expected) for expected in expected_texts(prompt.answer))
