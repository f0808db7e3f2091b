"""Full-text search (BM25) over a local JSONL corpus."""

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import Field

from podium.errors import InputError

MAX_CHARACTERS = 1200
"""Of one passage that is shown."""


def search(
    query: str,
    *,
    corpus: Annotated[Path, Field(description="JSONL file: one passage per line, as text or with the key `column`")],
    column: Annotated[str, Field(description="key of the passage's text")] = "text",
    results: Annotated[int, Field(ge=1, le=100, description="passages per call")] = 3,
) -> str:
    """Searches the documents and returns the passages that match the query best."""
    import bm25s

    if not query.strip():
        raise ValueError("the query is empty")
    index, passages = _index(corpus.resolve(), column)
    words = bm25s.tokenize([query], show_progress=False)
    found, scores = index.retrieve(words, k=min(results, len(passages)), show_progress=False)
    hits = [passages[place] for place, score in zip(found[0], scores[0], strict=True) if score > 0]
    return (
        "\n\n".join(f"[{number}] {text[:MAX_CHARACTERS]}" for number, text in enumerate(hits, start=1))
        or "nothing found"
    )


@lru_cache(maxsize=4)
def _index(corpus: Path, column: str) -> tuple[Any, list[str]]:
    """The index and the passages, once per process."""
    import bm25s

    passages = []
    for number, line in enumerate(corpus.read_bytes().splitlines(), start=1):
        if line.strip():
            row = orjson.loads(line)
            text = row if isinstance(row, str) else row.get(column) if isinstance(row, dict) else None
            if not isinstance(text, str):
                raise InputError(f"{corpus}, line {number}: no text under the key {column!r}")
            passages.append(text)
    if not passages:
        raise InputError(f"{corpus} holds no passages")
    index = bm25s.BM25()
    index.index(bm25s.tokenize(passages, show_progress=False), show_progress=False)
    return index, passages


search.package = "bm25s"  # type: ignore[attr-defined]
