"""1 if the last `<answer>…</answer>` holds one number and it is the expected integer, else 0.

Other text in the block (a unit, white space) does not count, but a second number does: `17 or 18` is no answer. The
row's answer is an integer, or a text with such a block.
"""

from typing import Any

from podium.reward.scoring.verifiers import answer_within, decimals_in, expected_integer, last_block, verifier


def label(answer: Any) -> str:
    """The integer of the answer, or of its last block."""
    block = last_block(answer, "answer") if isinstance(answer, str) else None
    return expected_integer(answer if block is None else block)


@verifier(label, gold=answer_within("<answer>", "</answer>"))
def answer_tag(text: str, expected: str) -> bool:
    """0 or 1."""
    block = last_block(text, "answer")
    return block is not None and list(decimals_in(block)) == [expected]
