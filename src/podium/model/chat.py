"""Messages to token ids, on the client side, and the tags around a model's thinking, in texts and in token ids.

Applies the tokenizer's chat template with the generation prompt. Messages without special tokens get exactly the ids of
`apply_chat_template(tokenize=True)`. A tokenizer without a template belongs to a base model; its prompt is the plain
text of the turns, separated by line breaks.

A special token inside a message stays text: users cannot end their turn by typing the end-of-turn token. A token is
special if the tokenizer says so. Other added tokens, such as `<think>` or `<tool_call>` of many models, are words that
a message may use.

Imports no torch, and tokenizer libraries only to render: reward workers use it too.
"""

import copy
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import count, groupby
from typing import Any

from podium.errors import InputError

Message = Mapping[str, str]


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    system: str | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[int, ...]:
    """Ids of the prompt. A trailing assistant turn (an example answer) is dropped: the policy writes that turn.
    `system` is added to messages that do not begin with their own system turn. `tools` are JSON schemas that the
    template describes to the policy."""
    turns = [dict(message) for message in messages]
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    if system is not None and (not turns or turns[0]["role"] != "system"):
        turns.insert(0, {"role": "system", "content": system})
    return encoded(tokenizer, turns, tools)


def encoded(
    tokenizer: Any, turns: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), after: str = ""
) -> tuple[int, ...]:
    """Ids of the turns and of the header of the policy's next turn; if `after` is given, of what follows that text."""
    if tokenizer.chat_template is None:
        text = applied(tokenizer, turns).rpartition(after)[2] if after else applied(tokenizer, turns)
        return tuple(tokenizer(text, add_special_tokens=not after, split_special_tokens=True, verbose=False).input_ids)
    text = applied(tokenizer, turns, tools)
    special = _special_tokens(tokenizer)
    if special is None or not any(special.search(part) for turn in turns for part in turn.values()):
        # No warning about length: rows that are too long are counted elsewhere.
        text = text.rpartition(after)[2] if after else text
        return tuple(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    masked, unmask = _masked(turns, special, text)
    text = applied(tokenizer, masked, tools)
    return tuple(_encode_with_text(tokenizer, text.rpartition(after)[2] if after else text, unmask, special))


@lru_cache(maxsize=4)
def _special_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """Finds special tokens in a text, the longest first. Cached: some models have hundreds, and every row asks."""
    every = sorted(_special_names(tokenizer), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, every))) if every else None


def _special_names(tokenizer: Any) -> set[str]:
    """Names of all special tokens; some of those that were added are not in `all_special_tokens`."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)} - {""}


def applied(
    tokenizer: Any, turns: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, with_header: bool = True
) -> str:
    """The text of the turns, with the header of the policy's next turn."""
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        return "\n".join(turn["content"] for turn in turns)
    try:
        return tokenizer.apply_chat_template(
            list(turns), tools=list(tools) or None, tokenize=False, add_generation_prompt=with_header
        )
    except (TemplateError, TypeError, ValueError) as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise InputError(f"the model's chat template rejects the turns {roles}: {error}") from None


def _masked(
    turns: Sequence[Message], special: re.Pattern[str], text: str
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
    from tokenizers import AddedToken

    doubled, nonce = copy.deepcopy(tokenizer), secrets.token_hex(16)
    added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    stand_ins = {name: f"x{nonce}x{number}x" for number, name in enumerate(sorted(_special_names(tokenizer)))}
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
    special = _special_names(tokenizer)
    tags = [token for token in special if any(token in tag for pair in STYLES.items() for tag in pair)]
    return dict(zip(tokenizer.convert_tokens_to_ids(tags), tags, strict=True))
