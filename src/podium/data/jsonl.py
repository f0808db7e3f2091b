"""Data from a JSON Lines file: one object a line.

A row has `messages` (a list of `role`/`content` turns) or `prompt` or `question` (a text), and usually `answer` or
`ground_truth`; optionally `reward` or `dataset` (the verifier's name or names). What else it has becomes metadata.
Every bad row is found before anything starts, and named by its line number.
"""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from podium.errors import InputError
from podium.records import Row

SHOWN = 20
"""Bad rows that the message lists."""

ROLES = ("system", "user", "assistant", "tool")


def jsonl(*, path: Annotated[Path, Field(description="the file")]) -> list[Row]:
    """Every row of the file, in its order."""
    if not path.is_file():
        raise InputError(f"data.path = {str(path)!r}: no such file")
    rows, complaints = [], []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows.append(_row(json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)))
        except (
            ValueError,
            TypeError,
            RecursionError,
        ) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
            complaints.append(f"  row {number}: {error}")
    if complaints:
        more = f"\n  and {len(complaints) - SHOWN} more" if len(complaints) > SHOWN else ""
        listing = "\n".join(complaints[:SHOWN])
        raise InputError(f"{path} has {len(complaints)} bad rows; mend or remove them:\n{listing}{more}")
    return rows


def _row(given: Any) -> Row:
    if not isinstance(given, dict):
        raise TypeError(f"expected an object, found {type(given).__name__}")
    fields = dict(given)
    reward = fields.pop("reward", fields.pop("dataset", ()))
    names = tuple(reward) if isinstance(reward, (list, tuple)) else (reward,)
    if not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"'reward' must be a name or a list of names, not {reward!r}")
    return Row(
        messages=_messages(fields),
        answer=fields.pop("answer", fields.pop("ground_truth", None)),
        reward=names,
        metadata=fields,
    )


def _messages(fields: dict[str, Any]) -> tuple[dict[str, str], ...]:
    """Takes the prompt out of the row, in whichever form it is given."""
    if "messages" in fields:
        turns = fields.pop("messages")
        if not isinstance(turns, list) or not turns:
            raise TypeError("'messages' must be a list with at least one turn")
        made = tuple(_turn(turn) for turn in turns)
        if all(turn["role"] == "assistant" for turn in made):
            raise ValueError("'messages' has no turn to answer")
        return made
    for key in ("prompt", "question"):
        if key in fields:
            return ({"role": "user", "content": _text(key, fields.pop(key))},)
    raise ValueError("has none of 'messages', 'prompt', 'question'")


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON value")


def _turn(turn: Any) -> dict[str, str]:
    if not isinstance(turn, dict) or turn.get("role") not in ROLES:
        raise TypeError(f"a turn needs a 'role' out of {', '.join(ROLES)}")
    return {"role": turn["role"], "content": _text("content", turn.get("content"))}


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TypeError(f"{key!r} must be a text that is not empty, not {value!r:.60}")
    value.encode("utf-8")  # a lone surrogate is an error here and not in the tokenizer
    if "\0" in value:
        raise ValueError(f"{key!r} holds a NUL character")
    return value
