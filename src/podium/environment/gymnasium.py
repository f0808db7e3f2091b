"""Environments of gymnasium that can be shown as text: a text as observation, or `render_mode = "ansi"`.

The action is the policy's turn if the action space is a text, otherwise the last whole number in it. The seed follows
from the row, so all episodes of a group begin in the same state.
"""

import re
from typing import Annotated, Any

from pydantic import Field

from podium.environment.episode.seeds import seed_of
from podium.records import Observation

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Gymnasium:
    package = "gymnasium"

    def __init__(
        self,
        *,
        id: Annotated[str, Field(description="the environment's id, or module:id")],
        rules: Annotated[str, Field(description="text that the policy reads before the first observation")] = "",
        options: Annotated[dict[str, Any], Field(description="keywords of gymnasium.make")] = {},  # noqa: B006
    ) -> None:
        import gymnasium

        self._spaces, self._rules = gymnasium.spaces, rules
        self._env: Any = gymnasium.make(id, **options)
        self._is_drawn = "ansi" in (self._env.metadata.get("render_modes") or ())
        if self._is_drawn:
            self._env.close()
            self._env = gymnasium.make(id, render_mode="ansi", **options)

    def reset(self, prompt: Any) -> str:
        seen, _ = self._env.reset(seed=seed_of(prompt))
        return "\n".join(filter(None, (self._rules, self._actions(), self._text(seen))))

    def step(self, reply: str) -> Observation:
        space = self._env.action_space
        if isinstance(space, self._spaces.Text):
            action: Any = reply.strip()
        else:
            numbers = re.findall(r"-?\d+", reply)
            action = int(numbers[-1]) if numbers else None
            if action is None or not space.contains(action):
                return Observation(f"That is no action. {self._actions()}")
        seen, reward, is_over, is_cut, _ = self._env.step(action)
        return Observation(self._text(seen), float(reward), bool(is_over or is_cut))

    def close(self) -> None:
        self._env.close()

    def _actions(self) -> str:
        space = self._env.action_space
        if isinstance(space, self._spaces.Discrete):
            return f"Answer with a number from {space.start} to {space.start + space.n - 1}."
        return ""

    def _text(self, seen: Any) -> str:
        return COLOURS.sub("", self._env.render()).strip() if self._is_drawn else str(seen)
