"""The tags around a model's thinking, such as `<think>…</think>`, in texts and in token ids.

Imports no torch and no tokenizer library: reward workers use it too.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

STYLES = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "[THINK]": "[/THINK]",  # Magistral
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "◁think▷": "◁/think▷",  # Kimi-VL
    "<|channel>thought": "<channel|>",  # Gemma 4
    "<|channel|>analysis<|message|>": "<|channel|>final<|message|>",  # gpt-oss
}
"""Opening tag → closing tag."""

CLOSE = "</think>"
LAST_IDS = 32
"""How many ids at the end of a prompt are searched for the tag: enough even if each character is a token."""


def opens_thinking(tokenizer: Any, token_ids: Sequence[int]) -> bool:
    """Whether the prompt ends in an opening tag, ignoring white space: the answer then starts inside the thinking."""
    end = tokenizer.decode(list(token_ids[-LAST_IDS:]), skip_special_tokens=False)
    return end.rstrip().endswith(tuple(STYLES))


def after_thinking(text: str, is_open: bool) -> str | None:
    """The text after the last closing tag, or the whole text if there is none; None if it ends inside the thinking.

    `is_open`: the prompt opened the thinking. An opening tag that is not at the beginning opens nothing. If only the
    text opens the thinking, only the matching closing tag closes it.
    """
    opened = next((tag for tag in STYLES if text.lstrip().startswith(tag)), None)
    closing = STYLES.values() if opened is None or is_open else [STYLES[opened]]
    end = max(at + len(tag) if (at := text.rfind(tag)) >= 0 else 0 for tag in closing)
    if not end:
        return None if is_open or opened else text
    answer = text[end:].strip()
    return after_thinking(answer, False) if answer.startswith(tuple(STYLES)) else answer


def decode_answer(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text without special tokens, except those that are thinking tags."""
    tags = _special_tags(tokenizer)
    if not tags:
        return tokenizer.decode(token_ids, skip_special_tokens=True)
    pieces = []
    for tag, ids in groupby(token_ids, tags.get):
        run = list(ids)
        pieces.append(tokenizer.decode(run, skip_special_tokens=True) if tag is None else tag * len(run))
    return "".join(pieces)


@lru_cache(maxsize=4)
def _special_tags(tokenizer: Any) -> dict[int, str]:
    """Id → text of the special tokens that are a tag or part of one; plain decoding would drop them."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()  # not all of them are in `all_special_tokens`
    special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
    tags = [token for token in special if token and any(token in tag for pair in STYLES.items() for tag in pair)]
    return dict(zip(tokenizer.convert_tokens_to_ids(tags), tags, strict=True))
