r"""1 if the last `\boxed{…}` of the text is mathematically the expected answer, else 0; nothing else counts.

Answers are compared as `math` compares them.
"""

from podium.records import Prompt, Rollout
from podium.reward.math import expected_answer, last_boxed, usable
from podium.reward.math_answers import same_answer
from podium.reward.scoring.verifiers import answer_within, declare_range, gold_answer, judges_answer, reads_answer


@gold_answer(answer_within(r"\boxed{", "}"))
@reads_answer(expected_answer)
@declare_range(0.0, 1.0)
@judges_answer
def strict_math(prompt: Prompt, rollout: Rollout) -> float:
    """0 or 1."""
    found = usable(last_boxed(rollout.text))
    return float(found is not None and same_answer(found, expected_answer(prompt.answer)))
