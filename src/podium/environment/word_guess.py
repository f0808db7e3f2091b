"""The policy guesses a word; each guess is answered letter by letter.

`+` is a letter at its place, `?` a letter of another place, `-` no letter of the word. The word is the row's answer if
that is a word, otherwise it follows from the row's messages. The reward is 1 for the word; a failed episode gets the
share of letters that its best guess had at their places, halved.
"""

import re
from collections import Counter
from typing import Annotated, Any

from pydantic import Field

from podium.environment.episode.seeds import seed_of
from podium.records import Observation

LISTED = (
    "apple beach brain bread chair clean cloud dance dream earth field flame fresh fruit glass grape green happy heart "
    "horse house juice knife laugh lemon light lunch magic metal money month mouse music night ocean paint paper party "
    "peace piano plant plate point queen quick radio river round salad sheep shirt sleep smile snake space spoon stone "
    "storm sugar sweet table tiger toast tower train truck uncle voice water whale wheat world youth zebra"
)
WORDS = LISTED.split()


class WordGuess:
    def __init__(self, *, guesses: Annotated[int, Field(ge=1, description="guesses in an episode")] = 6) -> None:
        self._left, self._best = guesses, 0.0

    def reset(self, prompt: Any) -> str:
        """The rules."""
        answer = str(prompt.answer or "").lower()
        self._word = answer if re.fullmatch("[a-z]{2,20}", answer) else WORDS[seed_of(prompt) % len(WORDS)]
        return (
            f"Guess a word of {len(self._word)} letters. You have {self._left} guesses; the last word that you write "
            "is the guess. I answer each letter: + right place, ? other place, - not in the word."
        )

    def step(self, reply: str) -> Observation:
        self._left -= 1
        words = re.findall("[a-z]+", reply.lower())
        guess = words[-1] if words else ""
        if guess == self._word:
            return Observation("Right.", reward=1.0, done=True)
        if len(guess) != len(self._word):
            said = f"That is no word of {len(self._word)} letters."
        else:
            said = marks(guess, self._word)
            self._best = max(self._best, said.count("+") / len(said))
        if self._left == 0:
            return Observation(f"{said} It was {self._word}.", reward=self._best / 2, done=True)
        return Observation(f"{said} {self._left} guesses left.")


def marks(guess: str, word: str) -> str:
    """A letter that the word has once is marked once."""
    free = Counter(own for own, given in zip(word, guess, strict=True) if own != given)
    found = []
    for own, given in zip(word, guess, strict=True):
        if own == given:
            found.append("+")
        elif free[given]:
            free[given] -= 1
            found.append("?")
        else:
            found.append("-")
    return "".join(found)
