r"""1 if the last `\boxed{…}` of the text is mathematically the expected answer, else 0; nothing else counts.

Answers are compared as `math` compares them.
"""

from podium.reward.math import expected_answer, last_boxed, usable
from podium.reward.math_answers import same_answer
from podium.reward.scoring.verifiers import answer_within, verifier


@verifier(expected_answer, gold=answer_within(r"\boxed{", "}"))
def strict_math(text: str, expected: str) -> bool:
    """0 or 1."""
    found = usable(last_boxed(text))
    return found is not None and same_answer(found, expected)
