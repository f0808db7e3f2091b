"""A seed for a game from its row, so that all episodes of a group play the same game."""

import hashlib
from typing import Any


def seed_of(prompt: Any) -> int:
    """The row's answer if it is a number, otherwise a hash of its messages; below 2³¹."""
    if str(prompt.answer).isdigit():
        return int(prompt.answer) % 2**31
    text = repr([dict(turn) for turn in prompt.messages]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") % 2**31
