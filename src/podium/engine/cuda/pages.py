"""Keys and values lie in pages of a fixed number of tokens; here is which page is free.

A page is a number: page n of every layer belongs to the same owner. Page 0 belongs to nobody. Rows of a batch that
nobody needs write there, so it is never handed out.
"""

from collections import deque
from collections.abc import Iterable

PAGE = 64
"""Tokens of a page; a multiple of the attention kernel's block, so that a block never crosses a page."""
SPARE_PAGE = 0


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE)


class FreePages:
    """The pages of a pool that have no owner. The page that was given back first is taken first."""

    def __init__(self, num_pages: int) -> None:
        self._pages = deque(page for page in range(num_pages) if page != SPARE_PAGE)

    def __len__(self) -> int:
        return len(self._pages)

    def take(self, count: int) -> list[int]:
        return [self._pages.popleft() for _ in range(count)]

    def give_back(self, pages: Iterable[int]) -> None:
        self._pages.extend(pages)
