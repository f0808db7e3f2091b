"""Rows to prompts in the run's order, and how much of each source goes into an epoch.

Ordinal i is place i mod epoch size in a shuffle that depends on (seed, epoch) alone. So a run's position is one number
plus the few pending ordinals below it, and a resumed run continues with exactly the prompts of an uninterrupted one.
Prompts that are too long or whose row is retired keep their ordinal and are skipped.

Each source has a pool of row indices, of which an epoch takes `quota`; by default all rows, once. `rows` makes the pool
a fixed selection. With `weight`, an epoch is as long as all sources together and is divided by weight; each source goes
through its pool repeatedly, reshuffled each time, so that the counts of any two rows differ by at most 1.
"""

import hashlib
import json
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any

from podium.errors import InputError
from podium.model.chat import opens_thinking, render
from podium.records import Group, Plan, Prompt, Row, RunState


@dataclass(frozen=True)
class Source:
    """The counts of one `[[data]]` table."""

    name: str
    num_rows: int
    """Rows of this source in the run."""
    max_prompt_tokens: int
    num_beyond_max_rows: int = 0
    """Rows that `max_rows` cut off."""
    weight: float | None = None
    """Share of the drawn prompts, relative to the other sources."""
    rows: int | float | None = None
    """An integer is a number of rows; a float is a share of the kept rows."""


@dataclass(frozen=True)
class Pool:
    """The row indices of one source (repeated rows occur several times), and how many of them an epoch takes."""

    indices: tuple[int, ...]
    quota: int

    def taken(self, epoch: int, key: str) -> list[int]:
        """The rows of `epoch`: places epoch·quota … in an endless sequence of shuffles, seeded by `key`."""
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
    """One pool per source; `is_kept` says which rows may be drawn. Shares count kept rows only."""
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
    """Whole copies of the rows, then a random part for the rest."""
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
    """Quotas by the largest-remainder method, at least 1 each."""
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


class OrderedData:
    """Stage 1: the rows of all sources, rendered once, served by ordinal."""

    def __init__(
        self,
        rows: Sequence[Row],
        sources: Sequence[Source],
        tokenizer: Any,
        plan: Plan,
        seed: int,
        system: str | None = None,
    ) -> None:
        """`rows` are the rows of all sources, one source after the other."""
        if not rows:
            raise InputError("data: the sources hold no rows; give a file or a split that has some")
        self._rows, self._plan, self._seed = rows, plan, seed
        self.sources, self.num_rows = sources, len(rows)
        self._ids = [_rendered(tokenizer, *named, system) for named in zip(self.row_names, rows, strict=True)]
        self._opens_thinking = [opens_thinking(tokenizer, ids) for ids in self._ids]
        limits = [source.max_prompt_tokens for source in sources for _ in range(source.num_rows)]
        self.is_kept = [0 < len(ids) <= limit for ids, limit in zip(self._ids, limits, strict=True)]
        if not any(self.is_kept):
            raise InputError(
                f"data: none of the {len(rows)} prompts fits: the shortest has {min(map(len, self._ids))} tokens and "
                f"{max(limits)} are allowed; raise max_prompt_tokens or lower rollout.max_new_tokens"
            )
        self.pools = make_pools(sources, self.is_kept, seed)
        self._epoch_size = sum(pool.quota for pool in self.pools)
        self._shuffle = lru_cache(maxsize=4)(self._shuffle_epoch)

    @property
    def all_lengths(self) -> list[int]:
        """Tokens of each row's prompt, kept or not."""
        return [len(ids) for ids in self._ids]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each kept prompt."""
        return [len(ids) for ids, kept in zip(self._ids, self.is_kept, strict=True) if kept]

    @property
    def rows(self) -> Sequence[Row]:
        """Every row, including dropped ones, in the order of the sources."""
        return self._rows

    @property
    def row_names(self) -> list[str]:
        """The name of each row in messages: its number in its table, and the table if there are several."""
        tables = [number for number, source in enumerate(self.sources, start=1) for _ in range(source.num_rows)]
        numbers = [number for source in self.sources for number in range(1, source.num_rows + 1)]
        names = [row.source or "the data" for row in self._rows]
        if len(self.sources) > 1:
            names = [f"{name} (table {table})" for name, table in zip(names, tables, strict=True)]
        return [f"row {number} of {name}" for number, name in zip(numbers, names, strict=True)]

    @property
    def tables(self) -> dict[int, str]:
        """Row index → the name of its table, with a number if several tables have that name."""
        names = [source.name for source in self.sources]
        unique = [name if names.count(name) == 1 else f"{name} {n}" for n, name in enumerate(names, start=1)]
        each = [name for name, source in zip(unique, self.sources, strict=True) for _ in range(source.num_rows)]
        return dict(enumerate(each))

    @property
    def rewards(self) -> list[tuple[str, ...]]:
        """The rewards that each row names."""
        return [tuple(row.reward) for row in self._rows]

    @property
    def reward_choices(self) -> set[tuple[str, ...]]:
        """Every combination of rewards that a row names; () for a row that names none."""
        return set(self.rewards)

    @property
    def num_steps(self) -> int:
        """Steps until the plan's steps or epochs are done; refills or retired rows may make it fewer."""
        if self._plan.epochs is None:
            return self._plan.steps
        prompts = self._plan.epochs * sum(self.num_drawn(pool) for pool in self.pools)
        return min(self._plan.steps, -(-prompts // self._plan.prompts_per_step))

    def num_drawn(self, pool: Pool) -> int:
        """Prompts that an epoch draws from the pool: its quota without the rows that are too long."""
        return pool.quota - sum(not self.is_kept[index] for index in pool.indices)

    @property
    def fingerprint(self) -> str:
        """Changes when any row, its rendering or its position changes: a resume rejects different data."""
        digest = hashlib.sha256()
        for row, ids in zip(self._rows, self._ids, strict=True):
            digest.update(json.dumps([row.answer, row.reward, row.metadata, ids], default=str).encode())
        return digest.hexdigest()

    def draw(self, state: RunState, count: int, under_way: Collection[int] = ()) -> list[Prompt]:
        """The next `count` prompts: the pending ones, then those from `next_ordinal` on, without retired rows.

        Fewer at the end of the last epoch. Prompts `under_way` were drawn before and are skipped.
        """
        prompts = (prompt for prompt in self._to_do(state) if prompt.ordinal not in under_way)
        return list(islice(prompts, count))

    def _to_do(self, state: RunState) -> Iterator[Prompt]:
        """A prompt drawn before its row was retired is still trained, also after a resume."""
        yield from (prompt for ordinal in state.pending if (prompt := self.prompt(ordinal)) is not None)
        if self._all_are_retired(state):
            return
        ordinal, retired = state.next_ordinal, set(state.retired)
        end = None if self._plan.epochs is None else self._plan.epochs * self._epoch_size
        while end is None or ordinal < end:
            prompt = self.prompt(ordinal)
            if prompt is not None and self._row_of(ordinal) not in retired:
                yield prompt
            ordinal += 1

    def advance(self, state: RunState, groups: Sequence[Group], under_way: Collection[int] = ()) -> RunState:
        """The state after these groups: `next_ordinal` is past them and past everything still `under_way`, which stays
        pending; the rows that they solved are retired."""
        done = {group.prompt.ordinal for group in groups}
        rate = self._plan.retire_pass_rate
        solved = {
            self._row_of(group.prompt.ordinal) for group in groups if rate is not None and group.pass_rate >= rate
        }
        return replace(
            state,
            next_ordinal=max((state.next_ordinal - 1, *done, *under_way)) + 1,
            pending=tuple(sorted({*state.pending, *under_way} - done)),
            retired=tuple(sorted({*state.retired, *solved})) if solved else state.retired,
        )

    def end(self, state: RunState) -> str | None:
        """Why the run is over, as text for people; None while it is not."""
        if state.step >= self._plan.steps:
            return f"run.steps = {self._plan.steps} is reached"
        if self._all_are_retired(state) and not state.pending:
            return f"every row was solved at filter.retire_pass_rate = {self._plan.retire_pass_rate} and is retired"
        if not self.draw(state, 1):
            return f"run.epochs = {self._plan.epochs} is reached"
        return None

    def prompt(self, ordinal: int) -> Prompt | None:
        """The prompt with that ordinal; None if it is too long."""
        index = self._row_of(ordinal)
        return self.prompt_of_row(index, ordinal) if self.is_kept[index] else None

    def prompt_of_row(self, index: int, ordinal: int) -> Prompt:
        """The row with this index as a prompt with this ordinal."""
        row = self._rows[index]
        given = (row.messages, row.answer, row.reward, row.source, row.metadata)
        return Prompt(ordinal, self._ids[index], *given, opens_thinking=self._opens_thinking[index])

    def in_order(self, count: int | None = None) -> list[Prompt]:
        """Every kept row once, unshuffled: for evaluation."""
        kept = [index for index, is_kept in enumerate(self.is_kept) if is_kept]
        return [self.prompt_of_row(index, index) for index in kept[:count]]

    def _row_of(self, ordinal: int) -> int:
        """The index of the ordinal's row; a row has the same index in every epoch."""
        epoch, place = divmod(ordinal, self._epoch_size)
        return self._shuffle(epoch)[place]

    def _all_are_retired(self, state: RunState) -> bool:
        if not state.retired:
            return False
        retired = set(state.retired)
        return all(index in retired for pool in self.pools for index in pool.indices if self.is_kept[index])

    def _shuffle_epoch(self, epoch: int) -> list[int]:
        pools = enumerate(self.pools)
        order = sorted(index for number, pool in pools for index in pool.taken(epoch, f"{self._seed}/{number}"))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def _rendered(tokenizer: Any, name: str, row: Row, system: str | None) -> tuple[int, ...]:
    try:
        return render(tokenizer, row.messages, system)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
