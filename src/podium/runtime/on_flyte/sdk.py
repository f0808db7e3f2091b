"""The only import of Flyte's SDK: it emits warnings and installs an exception hook, which are undone here."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quietly() -> Iterator[None]:
    """Around calls that import more of the SDK."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_excepthook = sys.excepthook
with quietly():
    import flyte as flyte
    import flyte.errors as errors
    import flyte.report as report
    import flyte.storage as storage
    from flyte.io import Dir as Dir
sys.excepthook = _excepthook

__all__ = ["Dir", "errors", "flyte", "quietly", "report", "storage"]
