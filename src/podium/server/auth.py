"""The outermost layer of the server: nothing is served before the token is right and the request within its limits.

It denies by default: every path and method needs the token but GET and HEAD of /health, so that a route added later
is closed too. It compares hashes in constant time and keeps only the hash. What it refuses, it refuses before the body
is read, or while it is.
"""

import asyncio
import hashlib
import hmac
import json
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from podium.server.limits import check_head, check_json, check_size, read_body
from podium.server.refusal import Refusal

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
