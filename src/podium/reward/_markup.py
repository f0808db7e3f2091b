"""What answers are marked up with: `<think>…</think>` before them, `<answer>…</answer>` around them."""

import re

THINK_END = "</think>"


def after_thinking(text: str) -> str:
    """What follows the last `</think>`, without the white space around it; the text as it is where there is none."""
    _, marker, tail = text.rpartition(THINK_END)
    return tail.strip() if marker else text


def final_text(text: str) -> str:
    """What follows the thinking, without `<answer>` tags and the white space around it."""
    return after_thinking(text).replace("<answer>", "").replace("</answer>", "").strip()


def last_block(text: str, *tags: str) -> str | None:
    """What stands in the last closed block of any of the tags, whose case does not matter; None without a block."""
    opened: dict[str, int] = {}
    found = None
    for match in re.finditer(rf"<(/?)({'|'.join(tags)})>", text, re.IGNORECASE):
        tag = match[2].lower()
        if not match[1]:
            opened[tag] = match.end()
        elif tag in opened:
            found = opened.pop(tag), match.start()
    return text[slice(*found)] if found else None
