"""1 if `</think>` is followed by an `<answer>…</answer>` block with only white space between, else 0.

Needs no answer. `<think>` itself is not asked for, since chat templates often open it in the prompt.
"""

import re

from podium.records import Prompt, Rollout
from podium.reward.scoring.verifiers import declare_range, gold_answer


@gold_answer("it scores the form, not the answer")
@declare_range(0.0, 1.0)
def r1_format(prompt: Prompt, rollout: Rollout) -> float:
    """0 or 1."""
    found = re.search(r"</think>\s*<answer>", rollout.text)
    return float(found is not None and "</answer>" in rollout.text[found.end() :])
