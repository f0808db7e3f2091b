"""F1 between the words of the last `<finish>` or `<answer>` block and of the answer; 0 without a block.

The answer is a text or a list of texts, of which the closest counts; the list may be written as JSON. `floor` is the
lowest score of a block that is not empty, so that a policy first learns to write one.
"""

from typing import Annotated

from pydantic import Field

from podium.reward.scoring.verifiers import answer_within, expected_texts_or_json, search_answer, verifier, word_f1


@verifier(expected_texts_or_json, gold=answer_within("<answer>", "</answer>"))
def search_f1(
    text: str,
    expected: list[str],
    *,
    floor: Annotated[float, Field(ge=0, lt=1, description="lowest score of a block that is not empty")] = 0.0,
) -> float:
    """0 … 1."""
    found = search_answer(text)
    return 0.0 if found is None else max(floor, *(word_f1(found, each) for each in expected))
