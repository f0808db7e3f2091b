"""Whether the text thinks before it answers: 0, 0.25, 0.5, 0.75 or 1.

| score | the text has |
|---|---|
| 0 | neither `<think>` nor `</think>` |
| 0.25 | one of them, or the first `</think>` before the first `<think>` |
| 0.5 | both in order, nothing within and nothing after |
| 0.75 | a thought within or an answer after |
| 1 | both |

Needs no answer. A chat template that opens `<think>` itself leaves 0.25 at most: use `r1_format` there.
"""

from podium.records import Prompt, Rollout
from podium.reward._contract import declare_range, gold_answer

OPEN, CLOSE = "<think>", "</think>"


@gold_answer("it scores the form, not the answer")
@declare_range(0.0, 1.0)
def think_format(prompt: Prompt, rollout: Rollout) -> float:
    """One of five values."""
    start, end = rollout.text.find(OPEN), rollout.text.find(CLOSE)
    if start < 0 and end < 0:
        return 0.0
    if start < 0 or end < start:
        return 0.25
    thought, answer = rollout.text[start + len(OPEN) : end], rollout.text[end + len(CLOSE) :]
    return 0.5 + 0.25 * bool(thought.strip()) + 0.25 * bool(answer.strip())
