"""1 if the last `<finish>` or `<answer>` block equals the answer in SQuAD's normal form, else 0.

The answer is a text or a list of texts, of which any will do; the list may be written as JSON.
"""

from podium.records import Prompt, Rollout
from podium.reward._contract import answer_within, checks_answer, declare_range, gold_answer
from podium.reward._search import check, found_answer, labels
from podium.reward._squad import normal_form
from podium.reward._thinking import judges_answer


@gold_answer(answer_within("<answer>", "</answer>"))
@checks_answer(check)
@declare_range(0.0, 1.0)
@judges_answer
def search(prompt: Prompt, rollout: Rollout) -> float:
    """0 or 1."""
    found = found_answer(rollout.text)
    return float(found is not None and normal_form(found) in map(normal_form, labels(prompt.answer)))
