"""Messages to token ids, on the client side.

The tokenizer's chat template with the generation prompt added; plain text where it has none (base models). A special
token written inside a message stays text: a user cannot end his own turn by typing the end-of-turn token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from podium.errors import InputError

Message = Mapping[str, str]


def render(tokenizer: Any, messages: Sequence[Message], system: str | None = None) -> tuple[int, ...]:
    """Ids of the prompt. A trailing assistant turn (an example answer) is dropped: the policy is to write it."""
    turns = [dict(message) for message in messages]
    if turns and turns[-1]["role"] == "assistant":
        turns.pop()
    if system is not None and (not turns or turns[0]["role"] != "system"):
        turns.insert(0, {"role": "system", "content": system})
    if tokenizer.chat_template is None:
        text = "\n".join(turn["content"] for turn in turns)
        return tuple(_encode_text(tokenizer, text, leading=True))
    specials = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    if not any(special in turn["content"] for turn in turns for special in specials):
        return tuple(_encode_template(tokenizer, _apply(tokenizer, turns)))
    return tuple(_encode_around(tokenizer, turns))


def _apply(tokenizer: Any, turns: list[dict[str, str]]) -> str:
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise InputError(f"the model's chat template refuses the turns {roles}: {error}") from None


def _encode_template(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def _encode_text(tokenizer: Any, text: str, *, leading: bool = False) -> list[int]:
    """User text: what looks like a special token is encoded as its characters."""
    return tokenizer(text, add_special_tokens=leading, split_special_tokens=True).input_ids


def _encode_around(tokenizer: Any, turns: list[dict[str, str]]) -> list[int]:
    """Renders with place-holders, then encodes the template's pieces and the users' texts each in their own way."""
    marks = [f"@@turn-{index}@@" for index in range(len(turns))]
    text = _apply(tokenizer, [{**turn, "content": mark} for turn, mark in zip(turns, marks, strict=True)])
    ids: list[int] = []
    for turn, mark in zip(turns, marks, strict=True):
        before, found, text = text.partition(mark)
        if not found:
            raise InputError(f"the chat template leaves out the {turn['role']} turn, which holds a special token")
        ids += _encode_template(tokenizer, before) + _encode_text(tokenizer, turn["content"])
    return ids + _encode_template(tokenizer, text)
