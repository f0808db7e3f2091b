"""Stage 1, from the `[[data]]` tables: rows to prompts in the run's order.

`read_sources` reads the rows of all tables before the model is loaded, so bad data is reported first; rendering them
needs the model's tokenizer. `OrderedData` serves them by ordinal. Ordinal i is place i mod epoch size in a shuffle that
depends on (seed, epoch) alone. So a run's position is one number plus the few pending ordinals below it, and a resumed
run continues with exactly the prompts of an uninterrupted one. Prompts that are too long or whose row is retired keep
their ordinal and are skipped. At the end: what `podium check` shows of the data.
"""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, islice
from statistics import median
from typing import Any

from podium.environment.build import build_playground
from podium.errors import InputError
from podium.model.chat import opens_thinking, render
from podium.model.load import Policy, Reader
from podium.records import Group, Plan, Prompt, Row, RunState
from podium.settings.contracts import user_code
from podium.settings.lookup import find
from podium.settings.sections import DataSource
from podium.settings.tables import Settings
from podium.untrusted import aligned

SHOWN_PROMPTS = 3
SHOWN_CHARACTERS = 400


@dataclass(frozen=True)
class Source:
    """One table of `[[data]]` and its rows, not rendered yet."""

    table: DataSource
    rows: Sequence[Row]
    num_beyond_max_rows: int = 0
    """Rows that `max_rows` cut off."""


def _ranges(sources: Sequence[Source]) -> list[range]:
    """The row indices of each source."""
    ends = list(accumulate(len(source.rows) for source in sources))
    return [range(end - len(source.rows), end) for source, end in zip(sources, ends, strict=True)]


class OrderedData:
    """Stage 1: the rows of all sources, rendered once, served by ordinal."""

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: Any,
        plan: Plan,
        seed: int,
        fits: int,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """`fits` is the number of tokens that a prompt may have."""
        rows = [row for source in sources for row in source.rows]
        if not rows:
            raise InputError("data: the sources hold no rows; give a file or a split that has some")
        self.rows, self.sources, self.num_rows, self._plan, self._seed = rows, sources, len(rows), plan, seed
        self.ranges = _ranges(sources)
        """The row indices of each source."""
        named_rows = zip(self.row_names, rows, strict=True)
        self._ids = [self._rendered(tokenizer, *named, system, tools) for named in named_rows]
        self._opens_thinking = [opens_thinking(tokenizer, ids) for ids in self._ids]
        self.all_lengths = [len(ids) for ids in self._ids]
        """Tokens of each row's prompt, kept or not."""
        self.limits = [min(fits, source.table.max_prompt_tokens or fits) for source in sources]
        """The most tokens that a prompt of each source may have."""
        limits = [limit for source, limit in zip(sources, self.limits, strict=True) for _ in source.rows]
        self.is_kept = [0 < length <= limit for length, limit in zip(self.all_lengths, limits, strict=True)]
        """Whether each row can be drawn: its prompt is neither empty nor too long."""
        if not any(self.is_kept):
            raise InputError(
                f"data: none of the {len(rows)} prompts fits: the shortest has {min(self.all_lengths)} tokens and "
                f"{max(limits)} are allowed; raise max_prompt_tokens or lower rollout.max_new_tokens"
            )
        self.pools = make_pools(sources, self.is_kept, seed)
        self._epoch_size = sum(pool.quota for pool in self.pools)
        self._shuffle = lru_cache(maxsize=4)(self._shuffle_epoch)

    @staticmethod
    def _rendered(
        tokenizer: Any, name: str, row: Row, system: str | None, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[int, ...]:
        try:
            return render(tokenizer, row.messages, system, tools)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each kept prompt."""
        return [length for length, is_kept in zip(self.all_lengths, self.is_kept, strict=True) if is_kept]

    @property
    def row_names(self) -> list[str]:
        """The name of each row in messages: its number in its table, and the table if there are several."""
        names = []
        for table, rows in enumerate(self.ranges, start=1):
            where = f" (table {table})" if len(self.ranges) > 1 else ""
            numbered = enumerate(rows, start=1)
            names += [f"row {number} of {self.rows[index].source or 'the data'}{where}" for number, index in numbered]
        return names

    @property
    def tables(self) -> dict[int, str]:
        """Row index → the name of its table, with a number if several tables have that name."""
        names = [source.table.name for source in self.sources]
        unique = [name if names.count(name) == 1 else f"{name} {n}" for n, name in enumerate(names, start=1)]
        return {index: name for name, rows in zip(unique, self.ranges, strict=True) for index in rows}

    @property
    def reward_choices(self) -> set[tuple[str, ...]]:
        """Every combination of rewards that a row names; () for a row that names none."""
        return {tuple(row.reward) for row in self.rows}

    @property
    def num_steps(self) -> int:
        """Steps until the plan's steps or epochs are done; refills or retired rows may make it fewer."""
        if self._plan.epochs is None:
            return self._plan.steps
        prompts = self._plan.epochs * sum(self.num_drawn(pool) for pool in self.pools)
        return min(self._plan.steps, -(-prompts // self._plan.prompts_per_step))

    def num_drawn(self, pool: "Pool") -> int:
        """Prompts that an epoch draws from the pool: its quota without the rows that are too long."""
        return pool.quota - sum(not self.is_kept[index] for index in pool.indices)

    @property
    def fingerprint(self) -> str:
        """Changes when any row, its rendering or its position changes: a resume rejects different data."""
        digest = hashlib.sha256()
        for row, ids in zip(self.rows, self._ids, strict=True):
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
        row = self.rows[index]
        given = (row.messages, row.answer, row.reward, row.source, row.metadata)
        return Prompt(ordinal, self._ids[index], *given, opens_thinking=self._opens_thinking[index])

    def in_order(self, count: int | None = None) -> list[Prompt]:
        """Every kept row once, unshuffled: for evaluation."""
        kept = (index for index, is_kept in enumerate(self.is_kept) if is_kept)
        return [self.prompt_of_row(index, index) for index in islice(kept, count)]

    def _row_of(self, ordinal: int) -> int:
        """The index of the ordinal's row; a row has the same index in every epoch."""
        epoch, place = divmod(ordinal, self._epoch_size)
        return self._shuffle(epoch)[place]

    def _all_are_retired(self, state: RunState) -> bool:
        retired = set(state.retired)
        kept = (index for pool in self.pools for index in pool.indices if self.is_kept[index])
        return bool(retired) and retired.issuperset(kept)

    def _shuffle_epoch(self, epoch: int) -> list[int]:
        pools = enumerate(self.pools)
        order = sorted(index for number, pool in pools for index in pool.taken(epoch, f"{self._seed}/{number}"))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


@dataclass(frozen=True)
class Pool:
    """The row indices of one source (repeated rows occur several times), and how many of them an epoch takes.

    By default an epoch takes all rows of a source, once. `rows` makes the pool a fixed selection. With `weight`, an
    epoch is as long as all sources together and is divided by weight; each source goes through its pool repeatedly,
    reshuffled each time, so that the counts of any two rows differ by at most 1.
    """

    indices: tuple[int, ...]
    quota: int

    def taken(self, epoch: int, key: str) -> list[int]:
        """The rows of `epoch`: places epoch·quota … in an endless sequence of shuffles, seeded by `key`."""
        size = len(self.indices)
        if self.quota == size:
            return list(self.indices)
        places = range(epoch * self.quota, (epoch + 1) * self.quota)
        turns = {}
        for turn in {place // size for place in places}:
            turns[turn] = list(self.indices)
            random.Random(f"{key}/{turn}").shuffle(turns[turn])
        return [turns[place // size][place % size] for place in places]


def make_pools(sources: Sequence[Source], is_kept: Sequence[bool], seed: int) -> list[Pool]:
    """One pool per source; `is_kept` says which rows may be drawn. Shares count kept rows only."""
    ranges = _ranges(sources)
    kept = [[index for index in each if is_kept[index]] for each in ranges]
    if any(source.table.weight is not None for source in sources):
        return _by_weight(sources, kept)
    made = []
    for number, (source, all_rows, some) in enumerate(zip(sources, ranges, kept, strict=True)):
        chosen = list(all_rows) if source.table.rows is None else _chosen(number, source.table, some, seed)
        made.append(Pool(tuple(chosen), len(chosen)))
    return made


def _chosen(number: int, table: DataSource, kept: list[int], seed: int) -> list[int]:
    """Whole copies of the rows, then a random part for the rest."""
    asked = table.rows
    if isinstance(asked, int) and asked > len(kept):
        raise InputError(
            f"data[{number}].rows = {asked}: {table.name} has {len(kept)} rows that are not too long; give fewer, or "
            "a share above 1.0 to repeat rows"
        )
    count = asked if isinstance(asked, int) else max(1, round((asked or 0) * len(kept)))
    if not kept:
        raise InputError(f"data[{number}].rows = {asked}: {table.name} has no row that is not too long")
    copies, rest = divmod(count, len(kept))
    return sorted(kept * copies + random.Random(f"{seed}/rows/{number}").sample(kept, rest))


def _by_weight(sources: Sequence[Source], kept: Sequence[list[int]]) -> list[Pool]:
    """Quotas by the largest-remainder method, at least 1 each."""
    for number, (source, some) in enumerate(zip(sources, kept, strict=True)):
        if not some:
            table = source.table
            raise InputError(f"data[{number}].weight = {table.weight}: {table.name} has no row that is not too long")
    total, weights = sum(map(len, kept)), [source.table.weight or 0.0 for source in sources]
    exact = [total * weight / sum(weights) for weight in weights]
    quotas = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: quotas[i] - exact[i])
    for index in by_remainder[: total - sum(quotas)]:
        quotas[index] += 1
    return [Pool(tuple(some), max(1, quota)) for some, quota in zip(kept, quotas, strict=True)]


@dataclass(frozen=True)
class RunData:
    """The rows that a run trains on, the held-out rows, and the plan with the number of steps that the rows allow."""

    plan: Plan
    train: OrderedData
    held_out: OrderedData | None

    @property
    def sources(self) -> list[OrderedData]:
        return [self.train, *([self.held_out] if self.held_out else [])]

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, including held-out prompts."""
        return max(max(source.lengths) for source in self.sources)

    @property
    def notes(self) -> list[str]:
        """A sentence for each source with rows that are left out."""
        held_out = left_out(self.held_out, "eval.data") if self.held_out else []
        return [*left_out(self.train, "data"), *held_out]


def read_sources(tables: Sequence[DataSource]) -> list[Source]:
    """Reads every source. This needs no model, so bad data is reported before a model is loaded."""
    read = []
    for table in tables:
        with user_code("data.name", table.name):
            rows = find("data", table.name)(**table.options)
        others = [row for row in rows if not isinstance(row, Row)] if isinstance(rows, (list, tuple)) else [rows]
        if others:
            raise InputError(
                f"data.name = {table.name!r} returned a {type(others[0]).__name__}; it must return a list of podium.Row"
            )
        some = rows[: table.max_rows]
        named = [Row(row.messages, row.answer, row.reward, row.source or table.name, row.metadata) for row in some]
        read.append(Source(table, named, len(rows) - len(some)))
    return read


def build_run_data(
    settings: Settings, sources: Sequence[Source], held_out: Sequence[Source], reader: Policy | Reader
) -> RunData:
    data = build_data(settings, sources, reader, settings.plan)
    plan = replace(settings.plan, steps=data.num_steps)
    return RunData(plan, data, build_data(settings, held_out, reader, plan) if held_out else None)


def build_data(settings: Settings, sources: Sequence[Source], reader: Policy | Reader, plan: Plan) -> OrderedData:
    longest_answer = settings.max_answer_tokens or 0
    context = min(reader.max_context_tokens, settings.max_engine_tokens)
    fits = context - longest_answer
    if fits < 1:
        keys = [key for key in ("max_new_tokens", "max_read_tokens") if key in settings.rollout.options]
        names = " + ".join(f"rollout.{key}" for key in keys)
        raise InputError(f"{names} = {longest_answer} leaves no room for a prompt in a context of {context}")
    playground = build_playground(settings, reader.tokenizer)
    system = playground.system(settings.rollout.options.get("system"))
    return OrderedData(sources, reader.tokenizer, plan, settings.run.seed, fits, system, playground.in_template)


def data_lines(data: OrderedData, tokenizer: Any, section: str) -> list[str]:
    """`section` is the name of the tables in the settings."""
    table = [("source", "rows", "kept", "dropped", "epoch", "prompt tokens", "rewards")]
    shown: list[str] = []
    for number, (source, limit, pool, rows) in enumerate(
        zip(data.sources, data.limits, data.pools, data.ranges, strict=True)
    ):
        kept = [index for index in rows if data.is_kept[index]]
        lengths = [data.all_lengths[index] for index in kept]
        row = (
            f"{section}[{number}] {source.table.name}",
            str(len(source.rows) + source.num_beyond_max_rows),
            str(len(kept)),
            _dropped(limit, [data.all_lengths[index] for index in rows], source.num_beyond_max_rows),
            str(data.num_drawn(pool)),
            f"{min(lengths)} to {max(lengths)}, median {median(lengths):.0f}" if lengths else "",
            _rewards([tuple(data.rows[index].reward) for index in kept]),
        )
        table.append(row)
        for index in kept[:SHOWN_PROMPTS]:
            prompt = data.prompt_of_row(index, index)
            text = _shortened(repr(tokenizer.decode(prompt.token_ids)))
            shown.append(
                f"{section}[{number}] row {index - rows.start + 1}: {text} → {_shortened(repr(prompt.answer))}"
            )
    head, *lines = aligned(table).splitlines()
    return [head, "─" * max(map(len, [head, *lines])), *lines, "as the policy sees them:", *shown]


def left_out(data: OrderedData, section: str) -> list[str]:
    """A sentence per source whose rows cannot all be used; `section` as in `data_lines`."""
    notes = []
    for number, (source, limit, rows) in enumerate(zip(data.sources, data.limits, data.ranges, strict=True)):
        where, lengths = f"{section}[{number}] ({source.table.name})", [data.all_lengths[index] for index in rows]
        longer = [length for length in lengths if length > limit]
        if longer:
            notes.append(
                f"{where}: {len(longer)} of {len(rows)} rows are left out, their prompts have more than "
                f"{limit} tokens (up to {max(longer)}); to use them, raise max_prompt_tokens of "
                "that table or the engine's max_context_tokens, or lower rollout.max_new_tokens"
            )
        if empty := lengths.count(0):
            notes.append(f"{where}: {empty} of {len(rows)} rows are left out, they are empty")
    return notes


def _dropped(limit: int, lengths: Sequence[int], beyond_max_rows: int) -> str:
    """How many rows are dropped, and why."""
    too_long = sum(length > limit for length in lengths)
    reasons = {f"over {limit} tokens": too_long, "empty": lengths.count(0), "beyond max_rows": beyond_max_rows}
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count) or "0"


def _rewards(named: Sequence[tuple[str, ...]]) -> str:
    """The rewards that the rows name, each with the number of rows."""
    counts = Counter(sorted(named))
    if set(counts) <= {()}:
        return "the settings'"
    named_by = {names: " + ".join(names) or "the settings'" for names in counts}
    return ", ".join(f"{named_by[names]} ({count})" for names, count in counts.items())


def _shortened(text: str) -> str:
    """Long texts keep their beginning and end."""
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 100]} … {text[-100:]}"
