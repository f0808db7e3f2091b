"""tokens.jsonl: the text of every token that a run has written, so that a page can show rollouts token by token.

It grows with the vocabulary in use, not with the run. Beside the ledger and not part of it: a text is never trained.
"""

import json
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

from podium.files import read_regular


class Pieces:
    """`decode` gives the text of one id; it is asked once an id."""

    def __init__(self, path: Path, decode: Callable[[int], str]) -> None:
        self._path, self._decode = path, decode
        self._known: set[int] | None = None

    def add(self, token_ids: Set[int]) -> None:
        if self._known is None:
            self._known = set(read_pieces(self._path))
        new = sorted(token_ids - self._known)
        if not new:
            return
        self._known.update(new)
        with self._path.open("a", encoding="ascii") as file:
            # A line of its own even where a kill cut the last one off.
            file.write("\n" + json.dumps({str(i): self._decode(i) for i in new}))


def read_pieces(path: Path) -> dict[int, str]:
    """By id. Lines that were cut off or have another format are skipped."""
    pieces: dict[int, str] = {}
    try:
        lines = read_regular(path).splitlines()
    except OSError:
        return pieces
    for line in lines:
        try:
            pieces |= {int(i): str(text) for i, text in json.loads(line).items()} if line else {}
        except (ValueError, AttributeError, RecursionError):
            continue
    return pieces


def piece_decoder(tokenizer: Any) -> Callable[[int], str]:
    """One id to its text. A tokenizer that marks spaces by ▁ drops a leading one when it decodes a token alone.

    The tokenizer beneath transformers' own is asked where there is one: five times as fast, cleaning nothing up.
    """
    beneath = getattr(tokenizer, "backend_tokenizer", None) or tokenizer

    def decode(token_id: int) -> str:
        text = beneath.decode([token_id], skip_special_tokens=False)
        raw = tokenizer.convert_ids_to_tokens(token_id)
        return f" {text}" if str(raw or "").startswith("▁") and not text.startswith(" ") else text

    return decode
