"""Objects with named columns to rows: what `jsonl` and `hub` share.

A row has `messages` (a list of `role`/`content` turns) or `prompt` or `question` (a text), and usually `answer` or
`ground_truth`; optionally `reward` or `dataset` (the names of its rewards). All other columns become metadata. Every
bad row is found before the run starts, and the error names it by its number.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from podium.errors import InputError
from podium.records import Row

SHOWN = 20
"""Largest number of bad rows that the message lists."""

MAX_CHARACTERS = 4_000_000
"""Limit per turn. No context holds more, and a tokenizer would take minutes for a row that is then dropped."""

ROLES = ("system", "user", "assistant", "tool")

PromptColumn = Annotated[str | None, Field(description="column of the prompt. Default: messages, prompt or question")]
AnswerColumn = Annotated[str | None, Field(description="column of the answer. Default: answer or ground_truth, if any")]
RewardColumn = Annotated[
    str | Literal[False] | None,
    Field(description="column that names the row's reward. Default: reward or dataset, if any; false: no column"),
]
Remap = Annotated[
    dict[str, str], Field(description='renames rewards: {gsm8k = "math"} scores with math the rows that name gsm8k')
]


@dataclass(frozen=True)
class Columns:
    """The name of each column; None looks for the usual names."""

    prompt: str | None = None
    answer: str | None = None
    reward: str | Literal[False] | None = None
    remap: Mapping[str, str] = field(default_factory=dict)
    """The name of a reward in the rows → the name of the reward that scores them. Applied once, without chains."""


def read_rows(
    where: str, numbered: Iterable[tuple[int, Any]], columns: Columns, parse: Callable[[Any], Any]
) -> list[Row]:
    """The rows of a source, which errors call `where`; `parse` turns each raw row into an object.

    One error lists all bad rows by their numbers.
    """
    rows: list[Row] = []
    complaints: list[str] = []
    for number, given in numbered:
        try:
            rows.append(_row(parse(given), columns))
        except RecursionError:
            complaints.append(f"  row {number}: nested too deeply")
        except (ValueError, TypeError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
            complaints.append(f"  row {number}: {error}")
    if complaints:
        more = f"\n  and {len(complaints) - SHOWN} more" if len(complaints) > SHOWN else ""
        listing = "\n".join(complaints[:SHOWN])
        bad = (
            "1 bad row; fix or remove it" if len(complaints) == 1 else f"{len(complaints)} bad rows; fix or remove them"
        )
        raise InputError(f"{where} has {bad}:\n{listing}{more}")
    return _renamed(rows, columns.remap)


def _renamed(rows: list[Row], remap: Mapping[str, str]) -> list[Row]:
    named = {name for row in rows for name in row.reward}
    for name in remap:
        if name not in named:
            raise InputError(f"data.remap.{name} has no effect: no row names the reward {name!r}; remove it")
    return [replace(row, reward=tuple(remap.get(name, name) for name in row.reward)) for row in rows] if remap else rows


def _row(given: Any, columns: Columns) -> Row:
    if not isinstance(given, dict):
        raise TypeError(f"expected an object, found {type(given).__name__}")
    fields = dict(given)
    return Row(
        messages=_prompt(fields, columns.prompt),
        answer=_taken(fields, columns.answer, ("answer", "ground_truth"), None),
        reward=() if columns.reward is False else _rewards(_taken(fields, columns.reward, ("reward", "dataset"), ())),
        metadata=fields,
    )


def _taken(fields: dict[str, Any], column: str | None, usual: tuple[str, ...], default: Any) -> Any:
    """Removes the named column and returns it. Without a name, removes all usual ones and returns the first."""
    if column is not None:
        if column not in fields:
            raise ValueError(f"has no {column!r}; it has: {', '.join(map(repr, fields)) or 'nothing else'}")
        return fields.pop(column)
    found = [fields.pop(name) for name in usual if name in fields]
    return found[0] if found else default


def _rewards(given: Any) -> tuple[str, ...]:
    names = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    if not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"'reward' must be a name or a list of names, not {given!r:.60}")
    return names


def _prompt(fields: dict[str, Any], column: str | None) -> tuple[dict[str, str], ...]:
    """Removes the prompt from the row: a list of turns, or a text."""
    key = column or next((key for key in ("messages", "prompt", "question") if key in fields), None)
    if key is None:
        raise ValueError("has none of 'messages', 'prompt', 'question'")
    given = _taken(fields, key, (), None)
    if key != "messages" and not isinstance(given, list):
        return ({"role": "user", "content": _text(key, given)},)
    if not isinstance(given, list) or not given:
        raise TypeError(f"{key!r} must be a list with at least one turn")
    turns = tuple(_turn(turn) for turn in given)
    if all(turn["role"] == "assistant" for turn in turns):
        raise ValueError(f"{key!r} has no turn to answer")
    return turns


def _turn(turn: Any) -> dict[str, str]:
    if not isinstance(turn, dict) or turn.get("role") not in ROLES:
        raise TypeError(f"a turn needs a 'role' out of {', '.join(ROLES)}")
    return {"role": turn["role"], "content": _text("content", turn.get("content"))}


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TypeError(f"{key!r} must be a text that is not empty, not {value!r:.60}")
    if len(value) > MAX_CHARACTERS:
        raise ValueError(f"{key!r} has {len(value):,} characters; at most {MAX_CHARACTERS:,} are read")
    value.encode("utf-8")  # a lone surrogate is an error here and not in the tokenizer
    if "\0" in value:
        raise ValueError(f"{key!r} holds a NUL character")
    return value
