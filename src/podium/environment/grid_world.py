"""The policy walks over a grid to a goal, around walls: up, down, left, right.

The map follows from the row; a way to the goal always exists. The reward is 1 at the goal, 0 otherwise.
"""

import random
import re
from typing import Annotated, Any

from pydantic import Field

from podium.environment.episode.seeds import seed_of
from podium.records import Observation

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
Place = tuple[int, int]


class GridWorld:
    def __init__(
        self,
        *,
        size: Annotated[int, Field(ge=2, le=30, description="rows and columns")] = 4,
        steps: Annotated[int, Field(ge=1, description="turns in an episode")] = 12,
        walls: Annotated[float, Field(ge=0, le=0.5, description="share of the places that are walls")] = 0.2,
    ) -> None:
        self._size, self._left, self._share = size, steps, walls

    def reset(self, prompt: Any) -> str:
        """The map and the rules."""
        draw = random.Random(seed_of(prompt))
        self._at, self._goal = (0, 0), (self._size - 1, self._size - 1)
        places = [(row, column) for row in range(self._size) for column in range(self._size)]
        free = [place for place in places if place not in (self._at, self._goal)]
        draw.shuffle(free)
        self._walls: set[Place] = set()
        for place in free[: int(self._share * len(places))]:
            self._walls.add(place)
            if not self._is_reachable():
                self._walls.remove(place)
        return (
            f"You are @ and walk to G, around the walls #. Write one of up, down, left, right in each turn; you have "
            f"{self._left} turns.\n{self._map()}"
        )

    def step(self, reply: str) -> Observation:
        """The last direction of the turn is the move."""
        self._left -= 1
        found = re.findall("|".join(MOVES), reply.lower())
        said = "Write up, down, left or right." if not found else ""
        if found:
            by = MOVES[found[-1]]
            to = (self._at[0] + by[0], self._at[1] + by[1])
            if to in self._walls or not all(0 <= each < self._size for each in to):
                said = "There is a wall."
            else:
                self._at = to
        if self._at == self._goal:
            return Observation("You are there.", reward=1.0, done=True)
        return Observation(f"{said}\n{self._map()}".strip(), done=self._left == 0)

    def _is_reachable(self) -> bool:
        seen, edge = {self._at}, [self._at]
        while edge:
            row, column = edge.pop()
            around = {(row + by[0], column + by[1]) for by in MOVES.values()}
            new = {place for place in around - seen - self._walls if all(0 <= each < self._size for each in place)}
            seen |= new
            edge += new
        return self._goal in seen

    def _map(self) -> str:
        signs = {self._goal: "G", **dict.fromkeys(self._walls, "#"), self._at: "@"}
        rows = range(self._size)
        return "\n".join("".join(signs.get((row, column), ".") for column in rows) for row in rows)
