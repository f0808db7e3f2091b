r"""1 if the answer that the text gives is mathematically the expected one, else 0.

The text's answer is its last `\boxed{…}`; else the text after the last "answer is", "correct option is", 答案是 or a
heading "Final Answer"; else the last formula (`$…$`); else the whole text. Without a box, only the last
`<answer>…</answer>` block is searched if there is one. Two answers are the same if their texts are the same apart from
layout and the spelling of signs, or if they are of one kind (amount, set, point, interval, equation, time, words) with
one value: `1/2` is `0.5`, `x = 5` is `5`, `\{1, 2\}` is `\{2, 1\}`, `50\%` is both `0.5` and `50`. math-verify decides
about notation that Podium does not read. The row's answer is a text or a number; of a text with a box, the box counts.
"""

from podium.records import Prompt, Rollout
from podium.reward.answers.text import judges_answer
from podium.reward.math_answers.find import expected_answer, find_answer
from podium.reward.math_answers.same import same_answer
from podium.reward.scoring.contract import answer_within, declare_range, gold_answer, reads_answer


@gold_answer(answer_within(r"The answer is \boxed{", "}"))
@reads_answer(expected_answer)
@declare_range(0.0, 1.0)
@judges_answer
def math(prompt: Prompt, rollout: Rollout) -> float:
    """0 or 1."""
    found = find_answer(rollout.text)
    return float(found is not None and same_answer(found, expected_answer(prompt.answer)))
