"""The share of the label's instructions that the text follows: IFEval's 25, or the 25 functions of Tulu 3.

The label's form is detected, see `_ifeval_label.py`. An empty answer follows nothing.
"""

from typing import Annotated

from pydantic import Field

from podium.records import Prompt, Rollout, Row
from podium.reward._contract import checks_answer, declare_range, gold_answer
from podium.reward._ifeval_label import constraints
from podium.reward._thinking import judges_answer


def check(row: Row) -> None:
    """The row's label names known instructions, each with the arguments that it needs."""
    constraints(row)


@gold_answer("what follows all instructions of a row is not in the row")
@checks_answer(check)
@declare_range(0.0, 1.0)
@judges_answer
def ifeval(
    prompt: Prompt,
    rollout: Rollout,
    *,
    all_or_nothing: Annotated[bool, Field(description="1 if every instruction is followed, else 0")] = False,
) -> float:
    """0 … 1."""
    followed = [constraint.is_followed(rollout.text) for constraint in constraints(prompt)]
    return float(all(followed)) if all_or_nothing else sum(followed) / len(followed)
