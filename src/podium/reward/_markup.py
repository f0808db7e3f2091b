"""What answers are marked up with, such as `<answer>…</answer>` around them."""

import re


def without_answer_tags(text: str) -> str:
    """The text without `<answer>` tags and the white space around it."""
    return text.replace("<answer>", "").replace("</answer>", "").strip()


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
