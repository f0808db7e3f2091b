"""A file from the web, with a bound on its size and on the time that it may take."""

import time
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from podium.errors import InputError

STALL_S = 10.0
"""Seconds without a byte after which a server is given up."""

MAX_S = 600.0
MAX_BYTES = 2 << 30
CHUNK_BYTES = 1 << 20


def download(url: str) -> bytes:
    """The content of an http(s) URL."""
    deadline = time.monotonic() + MAX_S
    try:
        request = Request(url, headers={"User-Agent": "podium"})
        with urlopen(request, timeout=STALL_S) as answer:
            return _read_all(answer, url, deadline)
    except InputError:
        raise
    except HTTPError as error:
        error.close()
        raise InputError(f"data.path = {url!r}: the server says {error.code} {error.reason}") from None
    except TimeoutError:
        raise InputError(f"data.path = {url!r}: the server sent nothing for {STALL_S:g} s") from None
    except (URLError, HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise InputError(f"data.path = {url!r} cannot be read: {reason}") from None


def _read_all(answer, url: str, deadline: float) -> bytes:
    """A server may say nothing of the length, or lie, so what arrives is counted."""
    content = bytearray()
    expected = answer.length
    while chunk := answer.read1(CHUNK_BYTES):
        content += chunk
        if len(content) > MAX_BYTES:
            raise InputError(
                f"data.path = {url!r} has more than {MAX_BYTES:,} bytes; download it, cut it and give the file"
            )
        if time.monotonic() > deadline:
            raise InputError(f"data.path = {url!r} was not read within {MAX_S:g} s; download it and give the file")
    if expected is not None and len(content) < expected:
        raise InputError(f"data.path = {url!r} broke off after {len(content):,} of {expected:,} bytes")
    return bytes(content)
