"""1 if the text equals the answer in SQuAD's normal form, else 0.

Normal form: lower case, without punctuation and the articles a, an and the, white space collapsed. If `answer`
is a list, any of its texts is right.
"""

from podium.reward.scoring.verifiers import expected_texts, is_any_of, verifier


@verifier(expected_texts, inline=True)
def exact(text: str, expected: list[str]) -> bool:
    """0 or 1."""
    return is_any_of(text, expected)
