"""How much of each source goes into an epoch.

Every source has a pool of row indices, from which each epoch takes `quota`. By default pool and quota are all its
rows, once. `rows` makes the pool a fixed choice of rows, repeated where it asks for more than there are. With
`weight` an epoch has as many prompts as all sources together, shared out by weight, and each source goes through its
pool again and again, in a new order each time, so that no row is ever two turns ahead of another.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from podium.errors import InputError


@dataclass(frozen=True)
class Source:
    """One `[[data]]` table, as far as it is about counts."""

    name: str
    num_rows: int
    """Rows that it has in the run."""
    max_prompt_tokens: int
    num_beyond_max_rows: int = 0
    """Rows that `max_rows` cut off."""
    weight: float | None = None
    """Share of the drawn prompts, relative to the other sources'."""
    rows: int | float | None = None
    """An integer is so many rows; a float is a share of those that are kept."""


@dataclass(frozen=True)
class Pool:
    """Row indices that one source may give, a row as often as it stands there, and how many an epoch takes."""

    indices: tuple[int, ...]
    quota: int

    def taken(self, epoch: int, key: str) -> list[int]:
        """What `epoch` takes: places epoch·quota … of an endless row of shuffles; `key` is the seed's."""
        if self.quota == len(self.indices):
            return list(self.indices)
        size = len(self.indices)
        places = range(epoch * self.quota, (epoch + 1) * self.quota)
        turns = {turn: self._shuffled(f"{key}/{turn}") for turn in {place // size for place in places}}
        return [turns[place // size][place % size] for place in places]

    def _shuffled(self, key: str) -> list[int]:
        order = list(self.indices)
        random.Random(key).shuffle(order)
        return order


def make_pools(sources: Sequence[Source], is_kept: Sequence[bool], seed: int) -> list[Pool]:
    """One for each source; `is_kept` says which rows may be drawn. Shares are of those: a dropped row is no prompt."""
    ranges, begin = [], 0
    for source in sources:
        ranges.append(range(begin, begin + source.num_rows))
        begin += source.num_rows
    kept = [[index for index in each if is_kept[index]] for each in ranges]
    if any(source.weight is not None for source in sources):
        return _by_weight(sources, kept)
    made = []
    for number, (source, all_rows, some) in enumerate(zip(sources, ranges, kept, strict=True)):
        chosen = list(all_rows) if source.rows is None else _chosen(number, source, some, seed)
        made.append(Pool(tuple(chosen), len(chosen)))
    return made


def _chosen(number: int, source: Source, kept: list[int], seed: int) -> list[int]:
    """Whole copies of the rows as far as they go, then a random part."""
    asked = source.rows
    if isinstance(asked, int) and asked > len(kept):
        raise InputError(
            f"data[{number}].rows = {asked}: {source.name} has {len(kept)} rows that are not too long; give fewer, or "
            "a share above 1.0 to repeat rows"
        )
    count = asked if isinstance(asked, int) else max(1, round((asked or 0) * len(kept)))
    if not kept:
        raise InputError(f"data[{number}].rows = {asked}: {source.name} has no row that is not too long")
    copies, rest = divmod(count, len(kept))
    return sorted(kept * copies + random.Random(f"{seed}/rows/{number}").sample(kept, rest))


def _by_weight(sources: Sequence[Source], kept: Sequence[list[int]]) -> list[Pool]:
    """Quotas by largest remainder, and at least 1."""
    for number, (source, some) in enumerate(zip(sources, kept, strict=True)):
        if not some:
            raise InputError(f"data[{number}].weight = {source.weight}: {source.name} has no row that is not too long")
    total, weights = sum(map(len, kept)), [source.weight or 0.0 for source in sources]
    exact = [total * weight / sum(weights) for weight in weights]
    quotas = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: quotas[i] - exact[i])
    for index in by_remainder[: total - sum(quotas)]:
        quotas[index] += 1
    return [Pool(tuple(some), max(1, quota)) for some, quota in zip(kept, quotas, strict=True)]
