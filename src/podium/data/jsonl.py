"""Data from a JSON Lines file or URL: one object per line.

In: a path, or an http(s) URL that is read once into memory, with limits on its size and time. Out: rows, from the
columns that `rows/columns.py` describes.
"""

import json
import math
import time
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from pydantic import Field

from podium.data.rows.columns import AnswerColumn, Columns, PromptColumn, Remap, RewardColumn, read_rows
from podium.errors import InputError
from podium.records import Row

UTF8_MARK, UTF16_MARKS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
"""What some editors put before the text."""


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


STALL_S = 10.0
"""Seconds without a byte after which the download fails."""

MAX_S = 600.0
MAX_BYTES = 2 << 30
CHUNK_BYTES = 1 << 20


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
