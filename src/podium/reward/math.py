r"""1 if the answer that the text gives is mathematically the expected one, else 0.

The text's answer is its last `\boxed{…}`; without one what follows the last "answer is", "correct option is", 答案是 or
a heading "Final Answer"; then the last formula (`$…$`); then the whole text. Without a box only an
`<answer>…</answer>` block is searched, where there is one. The two are the same if their texts are (layout and spelling
of signs aside), or if they are of one kind (amount, set, point, interval, equation, time, words) and have one value:
`1/2` is `0.5`, `x = 5` is `5`, `\{1, 2\}` is `\{2, 1\}`, `50\%` is both `0.5` and `50`. math-verify decides
about notation that Podium does not read. The row's answer is a text or a number; if it has a box, what stands in it.
"""

from podium.records import Prompt, Rollout
from podium.reward._contract import answer_within, checks_answer, declare_range, gold_answer
from podium.reward._math_equal import same_answer
from podium.reward._math_label import check, expected_answer
from podium.reward._math_text import find_answer
from podium.reward._thinking import judges_answer


@gold_answer(answer_within(r"The answer is \boxed{", "}"))
@checks_answer(check)
@declare_range(0.0, 1.0)
@judges_answer
def math(prompt: Prompt, rollout: Rollout) -> float:
    """0 or 1."""
    found = find_answer(rollout.text)
    return float(found is not None and same_answer(found, expected_answer(prompt.answer)))
