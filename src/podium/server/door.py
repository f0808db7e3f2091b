"""The outermost layer of the server: nothing is served before the token is right and the request is within its limits.

It denies by default: every path and method needs the token but GET and HEAD of /health, so that a route added later
is closed too. It compares hashes in constant time and keeps only the hash. A request must be JSON of bounded size,
depth and numbers, and it must arrive in bounded time; this is checked before anything is parsed.
"""

import asyncio
import hashlib
import hmac
import json
import re
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

OPENAI_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """`message` goes to the client, so it holds no secret and no path of this machine. `param` and `code` are for
    OpenAI's clients: the field at fault, and a word for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        return {"error": self.message}

    @property
    def openai_body(self) -> dict[str, Any]:
        kind = OPENAI_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def body_at(self, path: str) -> dict[str, Any]:
        """In the shape that clients of that path expect."""
        return self.openai_body if path.startswith("/v1/") else self.body


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


LINGER_S = 1.0
"""A refused client may go on sending for so long, so that it sees why instead of a broken connection."""


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


class Door:
    """ASGI around `app`. `token` is the hash of the one that opens; None lets everyone in (a private socket)."""

    def __init__(self, app: Any, token: bytes | None, count: Callable[[str, int], None], log: Callable[[str], None]):
        self.app, self._token, self._count, self._log = app, token, count, log

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no websockets here
            await send({"type": "websocket.close", "code": 1008})
            return
        answer = _Answer(send, scope["path"])
        try:
            check_size(scope)
            self._check_token(scope)
            await self.app(scope, await self._checked(scope, receive), answer.send)
        except Refusal as refusal:
            await answer.refuse(refusal, receive)
        except Exception as error:
            self._log(f"{scope['method']} failed: {_where(error)}")
            if answer.status is None:
                await answer.refuse(Refusal(500, "internal error"), receive)
        self._count(scope["path"], answer.status or 499)

    def _check_token(self, scope: Any) -> None:
        is_open = scope["path"] == "/health" and scope["method"] in ("GET", "HEAD")
        if self._token is None or is_open:
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, token = (given[0] if len(given) == 1 else b"").partition(b" ")
        if not hmac.compare_digest(hashlib.sha256(token).digest(), self._token) or scheme.lower() != b"bearer":
            raise Refusal(401, "the header `Authorization: Bearer TOKEN` is missing or wrong")

    async def _checked(self, scope: Any, receive: Any) -> Any:
        """`receive` with the whole body in its first message."""
        check_head(scope["method"], dict(scope["headers"]))
        body = await read_body(receive) if scope["method"] == "POST" else b""
        check_json(body)
        first = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Any:
            return first.pop() if first else await receive()

        return replay


class _Answer:
    """Sends, and knows whether it has begun."""

    def __init__(self, send: Any, path: str) -> None:
        self._send, self._path = send, path
        self.status: int | None = None

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)

    async def refuse(self, refusal: Refusal, receive: Any) -> None:
        if self.status is not None:
            return
        body = json.dumps(refusal.body_at(self._path)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if refusal.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if refusal.status == 503:
            headers.append((b"retry-after", b"1"))
        await self.send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await receive()).get("more_body", False):
                    pass
        await self._send({"type": "http.response.body", "body": b""})


def _where(error: BaseException) -> str:
    """The kind of error and the function that raised it: enough to look for, nothing that a log should not hold."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} in {frames[-1].name}, line {frames[-1].lineno}" if frames else type(error).__name__
