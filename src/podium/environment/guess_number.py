"""The policy guesses a number; each guess is answered with higher or lower.

The number follows from the row's answer if that is a number of the range, otherwise from the row's messages. The reward
is 1 for the number and 0 for running out of guesses.
"""

import re
from typing import Annotated, Any

from pydantic import Field

from podium.environment.episode.seeds import seed_of
from podium.records import Observation


class GuessNumber:
    def __init__(
        self,
        *,
        highest: Annotated[int, Field(ge=2, description="numbers are 1 to this")] = 100,
        guesses: Annotated[int, Field(ge=1, description="guesses in an episode")] = 8,
    ) -> None:
        self._highest, self._left = highest, guesses

    def reset(self, prompt: Any) -> str:
        """The rules."""
        given = str(prompt.answer)
        is_given = given.isdigit() and 1 <= int(given) <= self._highest
        self._number = int(given) if is_given else seed_of(prompt) % self._highest + 1
        return f"I think of a number from 1 to {self._highest}. You have {self._left} guesses. Answer with a number."

    def step(self, reply: str) -> Observation:
        """The last number of the turn is the guess."""
        found = re.findall("[0-9]+", reply)
        guess = found[-1].lstrip("0") if found else ""
        self._left -= 1
        if guess == str(self._number):
            return Observation("Right.", reward=1.0, done=True)
        if self._left == 0:
            return Observation(f"It was {self._number}.", done=True)
        if not found:
            return Observation(f"That is no number. {self._left} guesses left.")
        is_more = len(guess) > 12 or int(guess or 0) > self._number
        return Observation(f"{'Lower' if is_more else 'Higher'}. {self._left} guesses left.")
