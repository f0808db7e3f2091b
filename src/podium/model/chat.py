"""Messages to token ids, on the client side.

The tokenizer's chat template with the generation prompt added. A tokenizer without a template is a base model's, and
its prompt is the turns' plain text, a line break between them. A control token written inside a message stays text: a
user cannot end his own turn by typing the end-of-turn token.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError

from podium.errors import InputError

Message = Mapping[str, str]


def render(tokenizer: Any, messages: Sequence[Message], system: str | None = None) -> tuple[int, ...]:
    """Ids of the prompt. A trailing assistant turn (an example answer) is dropped: the policy is to write it.
    `system` is for messages that do not begin with a system turn of their own."""
    turns = [dict(message) for message in messages]
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    if system is not None and (not turns or turns[0]["role"] != "system"):
        turns.insert(0, {"role": "system", "content": system})
    if tokenizer.chat_template is None:
        text = "\n".join(turn["content"] for turn in turns)
        return tuple(tokenizer(text, add_special_tokens=True, split_special_tokens=True, verbose=False).input_ids)
    controls = _control_tokens(tokenizer, str(tokenizer.chat_template))
    if not any(control in turn["content"] for turn in turns for control in controls):
        return tuple(_encode_template(tokenizer, _apply(tokenizer, turns)))
    return tuple(_encode_around(tokenizer, turns, controls))


@lru_cache(maxsize=4)
def _control_tokens(tokenizer: Any, template: str) -> list[str]:
    """Added tokens that are special, or that the template writes: some models do not mark those as special. Kept, as
    some have thousands and every row asks."""
    added = tokenizer.added_tokens_decoder.values()
    return [token.content for token in added if token.special or (token.content.strip() and token.content in template)]


def _apply(tokenizer: Any, turns: list[dict[str, str]]) -> str:
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except (TemplateError, TypeError, ValueError) as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise InputError(f"the model's chat template refuses the turns {roles}: {error}") from None


def _encode_template(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids  # no warning of length: it is counted


def _encode_text(tokenizer: Any, text: str, controls: Sequence[str]) -> list[int]:
    """User text: what looks like a control token is cut behind its first character, so that no piece holds it."""
    found = re.finditer(f"(?={'|'.join(map(re.escape, controls))})", text)
    cuts = [0, *(match.start() + 1 for match in found), len(text)]
    ids: list[int] = []
    for begin, end in pairwise(cuts):
        ids += tokenizer(text[begin:end], add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids
    return ids


def _encode_around(tokenizer: Any, turns: list[dict[str, str]], controls: Sequence[str]) -> list[int]:
    """Renders with place-holders, then encodes the template's pieces and the users' texts each in their own way."""
    marks = [f"@@turn-{index}@@" for index in range(len(turns))]
    text = _apply(tokenizer, [{**turn, "content": mark} for turn, mark in zip(turns, marks, strict=True)])
    ids: list[int] = []
    for turn, mark in zip(turns, marks, strict=True):
        before, found, text = text.partition(mark)
        if not found:
            raise InputError(
                f"the chat template leaves out the {turn['role']} turn; without it no control token can be kept as text"
            )
        ids += _encode_template(tokenizer, before) + _encode_text(tokenizer, turn["content"], controls)
    return ids + _encode_template(tokenizer, text)
