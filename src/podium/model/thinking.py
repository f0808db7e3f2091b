"""The tags around a model's thinking, `<think>…</think>`, as the tokenizer sees them."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

OPEN, CLOSE = "<think>", "</think>"
LAST_IDS = 32
"""Ids at the end of a prompt that are searched for the tag: enough where each character is a token."""


def opens_thinking(tokenizer: Any, token_ids: Sequence[int]) -> bool:
    """Whether the prompt ends in `<think>`, white space aside: the answer to it then begins inside the thinking."""
    end = tokenizer.decode(list(token_ids[-LAST_IDS:]), skip_special_tokens=False)
    return end.rstrip().endswith(OPEN)


def decode_answer(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text without special tokens; the tags stay, also where the tokenizer calls them special."""
    special = [tag for tag in (OPEN, CLOSE) if tag in tokenizer.all_special_tokens]
    tags = dict(zip(tokenizer.convert_tokens_to_ids(special), special, strict=True))
    if not tags:
        return tokenizer.decode(token_ids, skip_special_tokens=True)
    pieces = []
    for tag, ids in groupby(token_ids, tags.get):
        run = list(ids)
        pieces.append(tokenizer.decode(run, skip_special_tokens=True) if tag is None else tag * len(run))
    return "".join(pieces)
