"""Tasks of reasoning_gym with feedback: after a wrong answer the policy may try again.

For rows of `data.name = "reasoning_gym"`. Answers are scored as by the reward of that name, which without a
`[[reward]]` table is also the rollout's reward, for the last try. With `reward.name = "environment"` each further try
costs.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from podium.records import Observation
from podium.settings.lookup import find


@dataclass(frozen=True)
class Said:
    """What the reward reads of a rollout."""

    text: str


class ReasoningGym:
    def __init__(
        self,
        *,
        tries: Annotated[int, Field(ge=1, description="answers in an episode")] = 3,
        decay: Annotated[float, Field(gt=0, le=1, description="factor of the reward for each further try")] = 0.7,
    ) -> None:
        self._tries, self._decay, self._tried = tries, decay, 0
        self._score = find("reward", "reasoning_gym")

    def reset(self, prompt: Any) -> None:
        """Nothing to say: the task is the row."""
        self._prompt = prompt
        self._score(prompt, Said(""))  # raises for rows of another source

    def step(self, reply: str) -> Observation:
        score = float(self._score(self._prompt, Said(reply)))
        self._tried += 1
        if score == 1.0 or self._tried == self._tries:
            return Observation(reward=score * self._decay ** (self._tried - 1), done=True)
        return Observation(f"That is not right. {self._tries - self._tried} more to try.")
