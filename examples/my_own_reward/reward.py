"""A reward of one's own: 1 for the right number after `####`, and some credit for one that is near it."""

from typing import Annotated

from pydantic import Field

from podium import Prompt, Rollout, declare_range, gold_answer


@gold_answer(lambda prompt: f"#### {prompt.answer}")  # what `podium check --rewards` tries as a right answer
@declare_range(0.0, 1.0)
def near(
    prompt: Prompt,
    rollout: Rollout,
    *,
    reach: Annotated[int, Field(ge=1, description="a number that is this far off, or farther, earns nothing")] = 10,
) -> float:
    _, marker, tail = rollout.text.rpartition("####")
    number = tail.strip()
    if not marker or len(number) > 9 or not number.removeprefix("-").isdecimal():
        return 0.0
    off = abs(int(number) - int(prompt.answer))
    return 1.0 if off == 0 else 0.5 * max(0.0, 1.0 - off / reach)
