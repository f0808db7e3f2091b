r"""1 if the last `\boxed{…}` of the text is mathematically the expected answer, else 0; nothing else counts.

Answers are compared as `math` compares them.
"""

from podium.records import Prompt, Rollout
from podium.reward._contract import answer_within, checks_answer, declare_range, gold_answer
from podium.reward._math_equal import same_answer
from podium.reward._math_label import check, expected_answer
from podium.reward._math_text import last_boxed, usable
from podium.reward._thinking import judges_answer


@gold_answer(answer_within(r"\boxed{", "}"))
@checks_answer(check)
@declare_range(0.0, 1.0)
@judges_answer
def strict_math(prompt: Prompt, rollout: Rollout) -> float:
    """0 or 1."""
    found = usable(last_boxed(rollout.text))
    return float(found is not None and same_answer(found, expected_answer(prompt.answer)))
