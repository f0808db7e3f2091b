"""Rows to prompts in the run's order.

Row of ordinal i: place i mod epoch size in a shuffle that depends on (seed, epoch) alone, of the rows that the epoch
takes from each source (`_mixture.py`; by default every row once). So the cursor of a run is one number, with the few
ordinals below it that were overtaken, and a resumed run goes on with the very prompts that the unbroken one would have
taken. Prompts that are too long or whose row is retired keep their ordinal and are skipped.
"""

import hashlib
import json
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any

from podium.data._mixture import Pool, Source, make_pools
from podium.errors import InputError
from podium.model.chat import render
from podium.model.thinking import opens_thinking
from podium.records import Group, Plan, Prompt, Row, RunState


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
        """`rows` are those of the sources, one after the other."""
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
        """Tokens of each prompt that is kept."""
        return [len(ids) for ids, kept in zip(self._ids, self.is_kept, strict=True) if kept]

    @property
    def rows(self) -> Sequence[Row]:
        """Every row, the dropped ones too, in the order of the sources."""
        return self._rows

    @property
    def row_names(self) -> list[str]:
        """What each row is called in messages: its number in its table, and which table where there are several."""
        tables = [number for number, source in enumerate(self.sources, start=1) for _ in range(source.num_rows)]
        numbers = [number for source in self.sources for number in range(1, source.num_rows + 1)]
        names = [row.source or "the data" for row in self._rows]
        if len(self.sources) > 1:
            names = [f"{name} (table {table})" for name, table in zip(names, tables, strict=True)]
        return [f"row {number} of {name}" for number, name in zip(numbers, names, strict=True)]

    @property
    def tables(self) -> dict[int, str]:
        """The table that each row is of, by index: its name, and its number where several have that name."""
        names = [source.name for source in self.sources]
        told = [name if names.count(name) == 1 else f"{name} {n}" for n, name in enumerate(names, start=1)]
        each = [name for name, source in zip(told, self.sources, strict=True) for _ in range(source.num_rows)]
        return dict(enumerate(each))

    @property
    def rewards(self) -> list[tuple[str, ...]]:
        """The rewards that each row names."""
        return [tuple(row.reward) for row in self._rows]

    @property
    def reward_choices(self) -> set[tuple[str, ...]]:
        """Every combination of rewards that a row names; () where it names none."""
        return set(self.rewards)

    @property
    def num_steps(self) -> int:
        """Steps until the plan's steps or epochs are done; with refills or retired rows there may be fewer."""
        if self._plan.epochs is None:
            return self._plan.steps
        prompts = self._plan.epochs * sum(self.num_drawn(pool) for pool in self.pools)
        return min(self._plan.steps, -(-prompts // self._plan.prompts_per_step))

    def num_drawn(self, pool: Pool) -> int:
        """Prompts that an epoch draws from the pool: its quota, less the rows in it that are too long."""
        return pool.quota - sum(not self.is_kept[index] for index in pool.indices)

    @property
    def fingerprint(self) -> str:
        """Changes when any row, its rendering or its place does: a resume refuses other data."""
        digest = hashlib.sha256()
        for row, ids in zip(self._rows, self._ids, strict=True):
            digest.update(json.dumps([row.answer, row.reward, row.metadata, ids], default=str).encode())
        return digest.hexdigest()

    def draw(self, state: RunState, count: int, under_way: Collection[int] = ()) -> list[Prompt]:
        """The next `count` prompts: the pending ones, then from the frontier on, retired rows aside; fewer at the end
        of the last epoch. Those `under_way` were drawn before and are passed over."""
        prompts = (prompt for prompt in self._to_do(state) if prompt.ordinal not in under_way)
        return list(islice(prompts, count))

    def _to_do(self, state: RunState) -> Iterator[Prompt]:
        """A row that was retired after its prompt was drawn is still trained, after a resume too."""
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
        """The state once these groups are done: its frontier behind them and behind all that is still `under_way`,
        which stays pending; the rows that they solved retired."""
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
        """Why the run is over, for people; None while it is not."""
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
        """The row with that index, under that ordinal."""
        row = self._rows[index]
        given = (row.messages, row.answer, row.reward, row.source, row.metadata)
        return Prompt(ordinal, self._ids[index], *given, opens_thinking=self._opens_thinking[index])

    def in_order(self, count: int | None = None) -> list[Prompt]:
        """Every kept row once, unshuffled: for evaluation."""
        kept = [index for index, is_kept in enumerate(self.is_kept) if is_kept]
        return [self.prompt_of_row(index, index) for index in kept[:count]]

    def _row_of(self, ordinal: int) -> int:
        """Its index, the same in every epoch."""
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
