"""1 if the last `<finish>` or `<answer>` block equals the answer in SQuAD's normal form, else 0.

The answer is a text or a list of texts, any of which is right; the list may be written as JSON.
"""

from podium.reward.scoring.verifiers import answer_within, expected_texts_or_json, is_any_of, search_answer, verifier


@verifier(expected_texts_or_json, gold=answer_within("<answer>", "</answer>"))
def search(text: str, expected: list[str]) -> bool:
    """0 or 1."""
    found = search_answer(text)
    return found is not None and is_any_of(found, expected)
