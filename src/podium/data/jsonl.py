"""Data from a JSON Lines file or URL: one object a line.

In: a path, or an http(s) URL that is read once into memory. Out: rows with the columns that `_rows.py` tells.
"""

import json
import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from podium.data._download import download
from podium.data._rows import AnswerColumn, Columns, PromptColumn, RewardColumn, read_rows
from podium.errors import InputError
from podium.records import Row

UTF8_MARK, UTF16_MARKS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
"""What some editors put before the text."""


def jsonl(
    *,
    path: Annotated[str, Field(description="the file, or an http:// or https:// URL")],
    prompt_column: PromptColumn = None,
    answer_column: AnswerColumn = None,
    reward_column: RewardColumn = None,
) -> list[Row]:
    """Every row of the file, in its order; blank lines are none."""
    lines = _content(path).removeprefix(UTF8_MARK).splitlines()
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    return read_rows(path, numbered, Columns(prompt_column, answer_column, reward_column), _parse)


def _content(path: str) -> bytes:
    if path.startswith(("http://", "https://")):
        content = download(path)
    elif not Path(path).is_file():
        raise InputError(f"data.path = {path!r}: no such file")
    else:
        content = _read(Path(path))
    if content.startswith(UTF16_MARKS):
        raise InputError(f"data.path = {path!r} is UTF-16 text; save it as UTF-8")
    return content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"data.path = {str(path)!r} cannot be read: {error.strerror}") from None


def _parse(line: bytes) -> Any:
    """JSON in the strict sense: no NaN, no number that is too large for a float, no key twice, no half a character."""
    given = json.loads(
        line.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_without_repeats
    )
    if b"\\u" in line:
        json.dumps(given, ensure_ascii=False).encode("utf-8")  # an escape may be one half of a surrogate pair
    return given


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON value")


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
