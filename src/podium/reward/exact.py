"""1 if the text equals the answer in SQuAD's normal form, else 0.

Normal form: lower case, without punctuation and the articles a, an and the, white space collapsed. Any of several
answers will do, where `answer` is a list.
"""

from podium.records import Prompt, Rollout
from podium.reward._contract import checks_answer, declare_range, runs_inline
from podium.reward._squad import check, expected_texts, normal_form
from podium.reward._thinking import judges_answer


@runs_inline
@checks_answer(check)
@declare_range(0.0, 1.0)
@judges_answer
def exact(prompt: Prompt, rollout: Rollout) -> float:
    """0 or 1."""
    return float(normal_form(rollout.text) in map(normal_form, expected_texts(prompt.answer)))
