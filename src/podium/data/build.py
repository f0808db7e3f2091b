"""From the `[[data]]` tables to the data stage.

In: tables of settings. Out: `OrderedData`, the rows of all tables, rendered, in the order of the run. Rows are read
before the model is loaded, so bad data is reported first; rendering them needs the model's tokenizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from podium.data.rows.order import OrderedData, Source
from podium.data.rows.table import left_out
from podium.errors import InputError
from podium.records import Plan, Row
from podium.settings.contracts import user_code
from podium.settings.lookup import find
from podium.settings.sections import DataSource
from podium.settings.tables import Settings


class Reader(Protocol):
    """What the data stage needs of a policy."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def max_context_tokens(self) -> int: ...


@dataclass(frozen=True)
class ReadSource:
    """One table of `[[data]]` and its rows, not rendered yet."""

    table: DataSource
    rows: Sequence[Row]
    num_beyond_max_rows: int


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


def read_sources(tables: Sequence[DataSource]) -> list[ReadSource]:
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
        read.append(ReadSource(table, named, len(rows) - len(some)))
    return read


def build_run_data(
    settings: Settings, rows: Sequence[ReadSource], held_out_rows: Sequence[ReadSource], reader: Reader
) -> RunData:
    data = build_data(settings, rows, reader, settings.plan)
    plan = replace(settings.plan, steps=data.num_steps)
    return RunData(plan, data, build_data(settings, held_out_rows, reader, plan) if held_out_rows else None)


def build_data(settings: Settings, read: Sequence[ReadSource], reader: Reader, plan: Plan) -> OrderedData:
    """The rows of all sources, rendered, in the run's order."""
    max_new_tokens = settings.rollout.options.get("max_new_tokens", 0)
    context = min(reader.max_context_tokens, settings.max_engine_tokens)
    fits = context - max_new_tokens
    if fits < 1:
        raise InputError(
            f"rollout.max_new_tokens = {max_new_tokens} leaves no room for a prompt in a context of {context}"
        )
    sources = [
        Source(
            name=each.table.name,
            num_rows=len(each.rows),
            max_prompt_tokens=min(fits, each.table.max_prompt_tokens or fits),
            num_beyond_max_rows=each.num_beyond_max_rows,
            weight=each.table.weight,
            rows=each.table.rows,
        )
        for each in read
    ]
    rows = [row for each in read for row in each.rows]
    system = settings.rollout.options.get("system")
    return OrderedData(rows, sources, reader.tokenizer, plan, settings.run.seed, system)
