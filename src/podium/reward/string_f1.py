"""F1 between the words of the text and of the answer, in SQuAD's normal form; the best of several answers.

`<answer>` tags do not count. F1 is twice the shared words over all words of both.
"""

from podium.reward.scoring.verifiers import expected_texts, verifier, without_answer_tags, word_f1


@verifier(expected_texts)
def string_f1(text: str, expected: list[str]) -> float:
    """0 … 1."""
    return max(word_f1(without_answer_tags(text), each) for each in expected)
