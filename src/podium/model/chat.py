"""Messages to token ids, on the client side.

Applies the tokenizer's chat template with the generation prompt. Messages without special tokens get exactly the ids of
`apply_chat_template(tokenize=True)`. A tokenizer without a template belongs to a base model; its prompt is the plain
text of the turns, separated by line breaks.

A special token inside a message stays text: users cannot end their turn by typing the end-of-turn token. A token is
special if the tokenizer says so. Other added tokens, such as `<think>` or `<tool_call>` of many models, are words that
a message may use.
"""

import copy
import hashlib
import json
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
    """Ids of the prompt. A trailing assistant turn (an example answer) is dropped: the policy writes that turn.
    `system` is added to messages that do not begin with their own system turn."""
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
        # No warning about length: rows that are too long are counted elsewhere.
        return tuple(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    masked, unmask = _masked(turns, special, text)
    return tuple(_encode_with_text(tokenizer, _apply(tokenizer, masked), unmask, special))


@lru_cache(maxsize=4)
def _special_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """Finds special tokens in a text, the longest first. Cached: some models have hundreds, and every row asks."""
    marked = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    every = sorted({*marked, *tokenizer.all_special_tokens} - {""}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, every))) if every else None


def _apply(tokenizer: Any, turns: list[dict[str, str]]) -> str:
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except (TemplateError, TypeError, ValueError) as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise InputError(f"the model's chat template rejects the turns {roles}: {error}") from None


def _masked(
    turns: list[dict[str, str]], special: re.Pattern[str], text: str
) -> tuple[list[dict[str, str]], Callable[[str], str]]:
    """The turns with a number instead of each special token, and a function that puts the tokens back. The template
    then treats the rest of a message as usual, and every special token in its output is its own."""
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
    """Ids of a template's output: the template's special tokens are special, those that `unmask` restores are text."""
    if not tokenizer.is_fast:  # Python tokenizers split at all added tokens or at none, so each piece is encoded alone
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
    """(a copy of the tokenizer, special token → its stand-in, stand-in's id → special token's id).

    A stand-in is an added token with the same rules that is not special and whose name no message can guess. With
    `split_special_tokens`, special tokens are split but stand-ins are not, so a whole prompt can be encoded at once,
    and spaces and line breaks next to a special token are treated as usual.
    """
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


def tokenizer_fingerprint(tokenizer: Any) -> dict[str, Any]:
    """Hashes of the vocabulary and of the chat template, and the special tokens with their ids."""
    special = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    roles = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk")}
    return {
        "vocabulary": _hash(sorted(tokenizer.get_vocab().items())),
        "special_ids": {**special, **roles},
        "chat_template": _hash(tokenizer.chat_template),
    }


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]
