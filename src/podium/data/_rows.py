"""Objects with named columns to rows: what `jsonl` and `hub` share.

A row has `messages` (a list of `role`/`content` turns) or `prompt` or `question` (a text), and usually `answer` or
`ground_truth`; optionally `reward` or `dataset` (the verifier's name or names). What else it has becomes metadata.
Every bad row is found before anything starts, and named by its number.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from podium.errors import InputError
from podium.records import Row

SHOWN = 20
"""Bad rows that the message lists."""

MAX_CHARACTERS = 4_000_000
"""Of one turn. No context holds more, and a tokenizer would work on it for minutes only to drop it."""

ROLES = ("system", "user", "assistant", "tool")

PromptColumn = Annotated[str | None, Field(description="by default messages, prompt or question")]
AnswerColumn = Annotated[str | None, Field(description="by default answer or ground_truth, where there is one")]
RewardColumn = Annotated[
    str | Literal[False] | None,
    Field(description="names each row's reward; by default reward or dataset, where there is one; false: none does"),
]


@dataclass(frozen=True)
class Columns:
    """Which columns hold what; None looks for the usual names."""

    prompt: str | None = None
    answer: str | None = None
    reward: str | Literal[False] | None = None


def read_rows(
    where: str, numbered: Iterable[tuple[int, Any]], columns: Columns, parse: Callable[[Any], Any]
) -> list[Row]:
    """The rows of a source that `where` names; `parse` makes an object of each thing in it. All that are bad are told
    together, each by its number."""
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
            "1 bad row; mend or remove it"
            if len(complaints) == 1
            else f"{len(complaints)} bad rows; mend or remove them"
        )
        raise InputError(f"{where} has {bad}:\n{listing}{more}")
    return rows


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
    """Takes the named column out of the row, or all of the usual ones, of which the first counts."""
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
    """Takes the prompt out of the row, as turns or as a text."""
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
