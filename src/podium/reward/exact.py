"""Reward 1 if the answer's text equals the expected one in SQuAD's normal form, else 0.

Normal form: lower case, without punctuation and the articles a, an and the, white space collapsed.
"""

import re
import string

from podium.records import Prompt, Rollout
from podium.reward._contract import declare_range, runs_inline


@runs_inline
@declare_range(0.0, 1.0)
def exact(prompt: Prompt, rollout: Rollout) -> float:
    """Any of several expected answers will do, where `answer` is a list."""
    if prompt.answer is None:
        raise ValueError("the row has no answer")
    expected = prompt.answer if isinstance(prompt.answer, list) else [prompt.answer]
    return float(normal_form(rollout.text) in {normal_form(str(text)) for text in expected})


def normal_form(text: str) -> str:
    """A text that is nothing but an article, such as the choice "A", keeps it."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split()) or " ".join(text.split())
