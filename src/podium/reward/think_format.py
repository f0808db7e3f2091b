"""Whether the text thinks before it answers: 0, 0.25, 0.5, 0.75 or 1.

| score | the text has |
|---|---|
| 0 | neither `<think>` nor `</think>` |
| 0.25 | one of the tags, or the first `</think>` before the first `<think>` |
| 0.5 | both tags in order, with no text between and none after |
| 0.75 | text between the tags or after them |
| 1 | text between the tags and after them |

Needs no answer. With a chat template that opens `<think>` itself the score is at most 0.25: use `r1_format` there.
"""

from podium.records import Prompt, Rollout
from podium.reward.scoring.verifiers import declare_range, gold_answer

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
