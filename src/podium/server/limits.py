"""What a request may be, asked before anything is parsed: JSON of bounded size, depth and numbers, in bounded time."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from podium.server.refusal import Refusal

MAX_BODY_BYTES = 8 << 20
MAX_DEPTH = 8
MAX_CONTAINERS = 20_000
"""Lists and objects in one body; an empty one costs twenty times its two bytes once parsed."""
MAX_VALUES = 600_000
"""Commas in one body, hence about as many token ids."""
MAX_STRINGS = 20_000
MAX_DIGITS = 20
"""Of one integer; 64 bits have 19."""
MAX_HEADER_BYTES = 16 << 10
"""Of the request line and all headers, checked where they are whole (`check_size`); h11 cuts longer ones off while
they arrive."""
HEADER_S = 10.0
"""From a connection, or the end of an answer on it, to a whole header."""
BODY_S = 20.0
SEND_S = 60.0
"""How long a client may leave its answer unread."""
MAX_CONNECTIONS = 2048

STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""One that does not end is a match too: else each quote in it would be tried to the end."""
LONG_NUMBER = re.compile(rb"\d{%d}" % (MAX_DIGITS + 1))
BRACKET = re.compile(rb"[\[\]{}]")


def check_size(scope: Mapping[str, Any]) -> None:
    """A header that arrives in one piece is not cut off by h11, however long it is."""
    line = len(scope["method"]) + len(scope.get("raw_path") or scope["path"]) + len(scope.get("query_string", b""))
    if line + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > MAX_HEADER_BYTES:
        raise Refusal(431, f"the request line and the headers have more than {MAX_HEADER_BYTES} bytes")


def check_head(method: str, headers: Mapping[bytes, bytes]) -> None:
    """Only a POST has a body, and it is JSON as it stands."""
    length = headers.get(b"content-length", b"0")
    if method != "POST":
        if length != b"0" or b"transfer-encoding" in headers:
            raise Refusal(400, f"a {method} has no body")
        return
    kind, _, parameters = headers.get(b"content-type", b"").lower().partition(b";")
    if kind.strip() != b"application/json" or parameters.replace(b" ", b"") not in (b"", b"charset=utf-8"):
        raise Refusal(415, "the body must be application/json in UTF-8")
    if b"content-encoding" in headers:
        raise Refusal(415, "the body must not be compressed")
    if not length.isdigit() or len(length) > 12 or int(length) > MAX_BODY_BYTES:
        raise Refusal(413, f"the body has more than {MAX_BODY_BYTES} bytes")


async def read_body(receive: Callable[[], Awaitable[Mapping[str, Any]]]) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise Refusal(400, "the body ended early")
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    raise Refusal(413, f"the body has more than {MAX_BODY_BYTES} bytes")
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise Refusal(408, f"the body was not there after {BODY_S:g} s") from None


def check_json(body: bytes) -> None:
    """Bounds what parsing will cost; whether it is JSON at all, the parser finds out."""
    if b"\0" in body or not _is_utf8(body):
        raise Refusal(400, "the body is not UTF-8 text")
    too_many = Refusal(413, f"the body has more than {MAX_VALUES} values or {MAX_STRINGS} texts")
    if body.count(b'"') - body.count(b'\\"') > 2 * MAX_STRINGS:
        raise too_many  # before the pattern has looked at millions of them
    bare, num_strings = STRING.subn(b"", body)
    if num_strings > MAX_STRINGS or bare.count(b",") > MAX_VALUES:
        raise too_many
    if LONG_NUMBER.search(bare):
        raise Refusal(400, f"a number has more than {MAX_DIGITS} digits")
    depth = 0
    for count, bracket in enumerate(BRACKET.finditer(bare), 1):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > MAX_DEPTH:
            raise Refusal(400, f"the body is nested more than {MAX_DEPTH} deep")
        if count > 2 * MAX_CONTAINERS:
            raise Refusal(413, f"the body has more than {MAX_CONTAINERS} lists and objects")


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True
