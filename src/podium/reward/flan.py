"""1 if all that follows the last "The answer is:" equals the answer in SQuAD's normal form, else 0.

Without those words the score is 0. Any of several answers will do, where `answer` is a list.
"""

from podium.records import Prompt, Rollout
from podium.reward._contract import answer_within, checks_answer, declare_range, gold_answer
from podium.reward._squad import check, expected_texts, normal_form
from podium.reward._thinking import judges_answer

MARKER = "The answer is:"


@gold_answer(answer_within("The answer is: "))
@checks_answer(check)
@declare_range(0.0, 1.0)
@judges_answer
def flan(prompt: Prompt, rollout: Rollout) -> float:
    """0 or 1."""
    _, marker, tail = rollout.text.rpartition(MARKER)
    return float(bool(marker) and normal_form(tail) in map(normal_form, expected_texts(prompt.answer)))
