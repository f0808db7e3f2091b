"""1 if the text after the last "The answer is:" equals the answer in SQuAD's normal form, else 0.

Without those words the score is 0. If `answer` is a list, any of its texts is right.
"""

from podium.reward.scoring.verifiers import answer_within, expected_texts, is_any_of, verifier

MARKER = "The answer is:"


@verifier(expected_texts, gold=answer_within(f"{MARKER} "))
def flan(text: str, expected: list[str]) -> bool:
    """0 or 1."""
    _, marker, tail = text.rpartition(MARKER)
    return bool(marker) and is_any_of(tail, expected)
