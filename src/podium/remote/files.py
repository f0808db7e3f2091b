"""Files that others may have put where Podium reads: opened only if they are regular ones.

A FIFO without a writer would keep the reader waiting for ever, and so would many a device.
"""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path, *, follow_links: bool = True) -> BufferedReader:
    """To read, without waiting. OSError where the path is no regular file, or a link that is not to be followed."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    descriptor = os.open(path, flags if follow_links else flags | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return open(descriptor, "rb")


def read_regular(path: Path, *, max_bytes: int | None = None, follow_links: bool = True) -> bytes:
    """The content; OSError beyond `max_bytes`."""
    with open_regular(path, follow_links=follow_links) as file:
        content = file.read() if max_bytes is None else file.read(max_bytes + 1)
    if max_bytes is not None and len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", str(path))
    return content
