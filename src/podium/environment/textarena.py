"""Games of textarena for one player, such as FrozenLake-v0, Sudoku-v0 or Minesweeper-v0.

The game's seed follows from the row, so all episodes of a group play the same game. The reward is the game's, from -1
to 1, at its end.
"""

from typing import Annotated, Any

from pydantic import Field

from podium.environment.episode.seeds import seed_of
from podium.records import Observation


class Textarena:
    package = "textarena"

    def __init__(
        self,
        *,
        game: Annotated[str, Field(description="the game's id in textarena")] = "FrozenLake-v0",
        options: Annotated[dict[str, Any], Field(description="keywords of the game, such as { size = 4 }")] = {},  # noqa: B006
    ) -> None:
        import textarena

        self._game, self._shown = textarena.make(game, **options), ""

    def reset(self, prompt: Any) -> str:
        self._game.reset(num_players=1, seed=seed_of(prompt))
        return self._new_text()

    def step(self, reply: str) -> Observation:
        done, _ = self._game.step(reply)
        text = self._new_text().removeprefix(f"[Player] {reply.strip()}").strip()
        if done:
            rewards, _ = self._game.close()
            return Observation(text, float((rewards or {}).get(0, 0.0)), done=True)
        return Observation(text or "(nothing happened)")

    def _new_text(self) -> str:
        """What the game has added since the last turn; some games show everything each time."""
        _, shown = self._game.get_observation()
        text = shown if isinstance(shown, str) else "\n".join(str(part[1]) for part in shown)
        new = text.removeprefix(self._shown)
        self._shown = text
        return new.strip()
