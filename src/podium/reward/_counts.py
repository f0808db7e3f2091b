"""What a reward counts beside its values, such as requests, tokens and money: summed over the group that it scores."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_current: ContextVar[Counter[str] | None] = ContextVar("counts of the group being scored", default=None)


def count(name: str, amount: float = 1.0) -> None:
    """Adds to the metric `reward/NAME` of the step. Rewards in worker processes are not heard."""
    counts = _current.get()
    if counts is not None:
        counts[name] += amount  # type: ignore[assignment]


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """What is counted inside, by tasks that start inside too."""
    counts: Counter[str] = Counter()
    token = _current.set(counts)
    try:
        yield counts
    finally:
        _current.reset(token)
