"""1 if the text equals the answer in SQuAD's normal form, else 0.

`<answer>` tags do not count. If `answer` is a list, any of its texts is right.
"""

from podium.reward.scoring.verifiers import expected_texts, is_any_of, verifier, without_answer_tags


@verifier(expected_texts)
def puzzle(text: str, expected: list[str]) -> bool:
    """0 or 1."""
    return is_any_of(without_answer_tags(text), expected)
