"""Data from a JSON Lines file or URL: one object per line.

In: a path, or an http(s) URL that is read once into memory, with limits on its size and time. Out: rows. An object has
`messages` (a list of `role`/`content` turns) or `prompt` or `question` (a text), and usually `answer` or
`ground_truth`; optionally `reward` or `dataset` (the names of its rewards). All other columns become metadata. Every
bad row is found before the run starts, and the error names it by its number. `hub` reads its columns with the same
functions.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

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

UTF8_MARK, UTF16_MARKS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
"""What some editors put before the text."""

STALL_S = 10.0
"""Seconds without a byte after which the download fails."""

MAX_S = 600.0
MAX_BYTES = 2 << 30
CHUNK_BYTES = 1 << 20


def jsonl(
    *,
    path: Annotated[str, Field(description="file, or http:// or https:// URL")],
    prompt_column: PromptColumn = None,
    answer_column: AnswerColumn = None,
    reward_column: RewardColumn = None,
    remap: Remap = {},  # noqa: B006
) -> list[Row]:
    """Every row of the file, in order; blank lines are skipped."""
    lines = _content(path).removeprefix(UTF8_MARK).splitlines()
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    return read_rows(path, numbered, Columns(prompt_column, answer_column, reward_column, remap), _parse)


def _content(path: str) -> bytes:
    if path.startswith(("http://", "https://")):
        content = download(path)
    elif not Path(path).is_file():
        raise InputError(f"data.path = {path!r}: no such file")
    else:
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise InputError(f"data.path = {path!r} cannot be read: {error.strerror}") from None
    if content.startswith(UTF16_MARKS):
        raise InputError(f"data.path = {path!r} is UTF-16 text; save it as UTF-8")
    return content


def _parse(line: bytes) -> Any:
    """Strict JSON: no NaN, no number too large for a float, no repeated key, no lone surrogate."""
    given = json.loads(
        line.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_without_repeats
    )
    if b"\\u" in line:
        json.dumps(given, ensure_ascii=False).encode("utf-8")  # an escape may be one half of a surrogate pair
    return given


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON value")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text:.40} is too large")
    return value


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return made


def download(url: str) -> bytes:
    """The content of an http(s) URL."""
    deadline = time.monotonic() + MAX_S
    try:
        request = Request(url, headers={"User-Agent": "podium"})
        with urlopen(request, timeout=STALL_S) as answer:
            return _read_all(answer, url, deadline)
    except InputError:
        raise
    except HTTPError as error:
        error.close()
        raise InputError(f"data.path = {url!r}: the server says {error.code} {error.reason}") from None
    except TimeoutError:
        raise InputError(f"data.path = {url!r}: the server sent nothing for {STALL_S:g} s") from None
    except (URLError, HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise InputError(f"data.path = {url!r} cannot be read: {reason}") from None


def _read_all(answer, url: str, deadline: float) -> bytes:
    """Counts the received bytes: a server may not announce the length, or may lie about it."""
    content = bytearray()
    expected = answer.length
    while chunk := answer.read1(CHUNK_BYTES):
        content += chunk
        if len(content) > MAX_BYTES:
            raise InputError(
                f"data.path = {url!r} has more than {MAX_BYTES:,} bytes; download it, cut it and give the file"
            )
        if time.monotonic() > deadline:
            raise InputError(f"data.path = {url!r} was not read within {MAX_S:g} s; download it and give the file")
    if expected is not None and len(content) < expected:
        raise InputError(f"data.path = {url!r} broke off after {len(content):,} of {expected:,} bytes")
    return bytes(content)


# Objects with named columns to rows


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
