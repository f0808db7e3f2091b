"""How long answers are, by prompt: the same for one ordinal however often it is asked."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Lengths(Protocol):
    def of(self, ordinal: int, rollouts: int) -> Sequence[int]:
        """Tokens of each rollout."""
        ...


@dataclass(frozen=True)
class Constant:
    tokens: int

    def of(self, ordinal: int, rollouts: int) -> Sequence[int]:
        return [self.tokens] * rollouts


@dataclass(frozen=True)
class LogNormal:
    """A tail like that of reasoning: `median` tokens, cut at `most`. Half of the variance of the logarithm is the
    prompt's, since a hard one makes all of its answers long."""

    median: float
    sigma: float
    most: int

    def of(self, ordinal: int, rollouts: int) -> Sequence[int]:
        draw = random.Random(ordinal)
        part = self.sigma * math.sqrt(0.5)
        centre = math.log(self.median) + draw.gauss(0, part)
        return [min(self.most, max(1, round(math.exp(centre + draw.gauss(0, part))))) for _ in range(rollouts)]


@dataclass(frozen=True)
class Observed:
    """Whole groups of a run, drawn again and again."""

    groups: Sequence[Sequence[int]]

    def of(self, ordinal: int, rollouts: int) -> Sequence[int]:
        draw = random.Random(ordinal)
        group = draw.choice(self.groups)
        return group if len(group) == rollouts else draw.choices(group, k=rollouts)


def lengths_of_run(folder: Path) -> Observed:
    """From the ledger of a run."""
    groups: dict[tuple[str, int], list[int]] = {}
    for path in sorted((folder / "rollouts").glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            rollout = json.loads(line)
            groups.setdefault((path.name, rollout["ordinal"]), []).append(len(rollout["token_ids"]))
    return Observed(tuple(groups.values()))
