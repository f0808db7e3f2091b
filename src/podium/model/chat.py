"""Messages to token ids, on the client side.

The tokenizer's chat template with the generation prompt added: exactly the ids of `apply_chat_template(tokenize=True)`
for messages without special tokens. A tokenizer without a template is a base model's, and its prompt is the turns'
plain text, a line break between them.

A special token written inside a message stays text: a user cannot end his own turn by typing the end-of-turn token.
Special is what the tokenizer says is special. Added tokens that are not, such as `<think>` or `<tool_call>` of many
models, are words that a message may use, and the model has learned them as such.
"""

import copy
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Any

from jinja2 import TemplateError
from tokenizers import AddedToken

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
    text = _apply(tokenizer, turns)
    special = _special_tokens(tokenizer)
    if special is None or not any(special.search(part) for turn in turns for part in turn.values()):
        # no warning of length: rows that are too long are counted elsewhere
        return tuple(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    masked, unmask = _masked(turns, special, text)
    return tuple(_encode_with_text(tokenizer, _apply(tokenizer, masked), unmask, special))


@lru_cache(maxsize=4)
def _special_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """Finds the special tokens in a text, the longest first. Kept, as some models have hundreds and every row asks."""
    marked = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    every = sorted({*marked, *tokenizer.all_special_tokens} - {""}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, every))) if every else None


def _apply(tokenizer: Any, turns: list[dict[str, str]]) -> str:
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except (TemplateError, TypeError, ValueError) as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise InputError(f"the model's chat template refuses the turns {roles}: {error}") from None


def _masked(
    turns: list[dict[str, str]], special: re.Pattern[str], text: str
) -> tuple[list[dict[str, str]], Callable[[str], str]]:
    """The turns with a number in the place of each special token, and what puts the tokens back. So the template does
    with the rest of a message what it always does, and the special tokens in its output are its own."""
    everything = "\n".join([text, *(part for turn in turns for part in turn.values())])
    number = next(number for number in map(str, count(10**11)) if number not in everything)
    found: list[str] = []

    def mask(match: re.Match[str]) -> str:
        found.append(match.group())
        return f"{number}{len(found) - 1:09d}"

    masked = [{key: special.sub(mask, part) for key, part in turn.items()} for turn in turns]
    masks = re.compile(f"{number}([0-9]{{9}})")
    return masked, lambda piece: masks.sub(lambda match: found[int(match.group(1))], piece)


def _encode_with_text(tokenizer: Any, masked: str, unmask: Callable[[str], str], special: re.Pattern[str]) -> list[int]:
    """Ids of a template's output: its own special tokens are special, those that `unmask` puts back are text."""
    if not tokenizer.is_fast:  # Python tokenizers split at all added tokens or at none: each piece is encoded alone
        pieces = re.split(f"({special.pattern})", masked)
        return [i for place, piece in enumerate(pieces) for i in _piece_ids(tokenizer, unmask(piece), place % 2 == 1)]
    doubled, stand_ins, originals = _with_stand_ins(tokenizer)
    own = special.sub(lambda match: stand_ins[match.group()], masked)
    ids: list[int] = doubled(unmask(own), add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids
    return [originals.get(i, i) for i in ids]


def _piece_ids(tokenizer: Any, piece: str, is_special: bool) -> list[int]:
    if is_special:
        return [tokenizer.convert_tokens_to_ids(piece)]
    return tokenizer(piece, add_special_tokens=False, split_special_tokens=True, verbose=False).input_ids


@lru_cache(maxsize=4)
def _with_stand_ins(tokenizer: Any) -> tuple[Any, dict[str, str], dict[int, int]]:
    """A copy of the tokenizer with a stand-in for each special token: an added token of the same rules that is not
    special, with a name that no message can guess. Where special tokens are split, stand-ins are not, so a whole
    prompt can be encoded at once, and spaces and line breaks next to a special token are treated as ever.
    Also: the stand-in of each special token, and the id of the token that each stand-in's id means."""
    doubled, nonce = copy.deepcopy(tokenizer), secrets.token_hex(16)
    added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    specials = sorted({*(name for name, token in added.items() if token.special), *tokenizer.all_special_tokens})
    stand_ins = {name: f"x{nonce}x{number}x" for number, name in enumerate(specials)}
    for name, stand_in in stand_ins.items():
        token = added.get(name, AddedToken(name, normalized=False))
        rules = {rule: getattr(token, rule) for rule in ("single_word", "lstrip", "rstrip", "normalized")}
        doubled.add_tokens([AddedToken(name, special=True, **rules)], special_tokens=True)
        doubled.add_tokens([AddedToken(stand_in, special=False, **rules)])
    to_id = tokenizer.convert_tokens_to_ids
    return doubled, stand_ins, {doubled.convert_tokens_to_ids(stand): to_id(name) for name, stand in stand_ins.items()}
