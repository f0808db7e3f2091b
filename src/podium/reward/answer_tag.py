"""1 if the last `<answer>…</answer>` holds one number and it is the expected integer, else 0.

Other text in the block (a unit, white space) does not count, but a second number does: `17 or 18` is no answer. The
row's answer is an integer, or a text with such a block.
"""

from typing import Any

from podium.records import Prompt, Rollout
from podium.reward.scoring.verifiers import (
    answer_within,
    decimals_in,
    declare_range,
    expected_integer,
    gold_answer,
    judges_answer,
    last_block,
    reads_answer,
)


def label(answer: Any) -> str:
    """The integer of the answer, or of its last block."""
    block = last_block(answer, "answer") if isinstance(answer, str) else None
    return expected_integer(answer if block is None else block)


@gold_answer(answer_within("<answer>", "</answer>"))
@reads_answer(label)
@declare_range(0.0, 1.0)
@judges_answer
def answer_tag(prompt: Prompt, rollout: Rollout) -> float:
    """0 or 1."""
    block = last_block(rollout.text, "answer")
    return float(block is not None and list(decimals_in(block)) == [label(prompt.answer)])
