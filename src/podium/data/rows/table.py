"""What `podium check` says about the data: a table with one line per source, and the first rendered prompts."""

import io
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from podium.data.rows.order import OrderedData, Source

SHOWN_PROMPTS = 3
SHOWN_CHARACTERS = 400
WIDTH = 116


def data_lines(data: OrderedData, tokenizer: Any, section: str) -> list[str]:
    """`section` is the name of the tables in the settings."""
    heads = ["source", "rows", "kept", "dropped", "epoch", "prompt tokens", "rewards"]
    table = Table(*heads, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    all_lengths, all_rewards = data.all_lengths, data.rewards
    shown: list[str] = []
    begin = 0
    for number, (source, pool) in enumerate(zip(data.sources, data.pools, strict=True)):
        rows, begin = range(begin, begin + source.num_rows), begin + source.num_rows
        kept = [index for index in rows if data.is_kept[index]]
        lengths = [all_lengths[index] for index in kept]
        table.add_row(
            f"{section}[{number}] {source.name}",
            str(source.num_rows + source.num_beyond_max_rows),
            str(len(kept)),
            _dropped(source, [all_lengths[index] for index in rows]),
            str(data.num_drawn(pool)),
            f"{min(lengths)} to {max(lengths)}, median {median(lengths):.0f}" if lengths else "",
            _rewards([all_rewards[index] for index in kept]),
        )
        for index in kept[:SHOWN_PROMPTS]:
            prompt = data.prompt_of_row(index, index)
            text = _shortened(repr(tokenizer.decode(prompt.token_ids)))
            shown.append(
                f"{section}[{number}] row {index - rows.start + 1}: {text} → {_shortened(repr(prompt.answer))}"
            )
    return [*_as_lines(table), "as the policy sees them:", *shown]


def left_out(data: OrderedData, section: str) -> list[str]:
    """A sentence per source whose rows cannot all be used; `section` as in `data_lines`."""
    notes, begin, lengths = [], 0, data.all_lengths
    for number, source in enumerate(data.sources):
        own, begin = lengths[begin : begin + source.num_rows], begin + source.num_rows
        longer = [length for length in own if length > source.max_prompt_tokens]
        if longer:
            notes.append(
                f"{section}[{number}] ({source.name}): {len(longer)} of {len(own)} rows are left out, their prompts "
                f"have more than {source.max_prompt_tokens} tokens (up to {max(longer)}); to use them, raise "
                "max_prompt_tokens of that table or the engine's max_context_tokens, or lower rollout.max_new_tokens"
            )
        if empty := own.count(0):
            notes.append(
                f"{section}[{number}] ({source.name}): {empty} of {len(own)} rows are left out, they are empty"
            )
    return notes


def _dropped(source: Source, lengths: Sequence[int]) -> str:
    """How many rows are dropped, and why."""
    too_long = sum(length > source.max_prompt_tokens for length in lengths)
    reasons = {
        f"over {source.max_prompt_tokens} tokens": too_long,
        "empty": lengths.count(0),
        "beyond max_rows": source.num_beyond_max_rows,
    }
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


def _as_lines(table: Table) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=WIDTH, color_system=None).print(table)
    return [line.rstrip() for line in text.getvalue().splitlines()]
