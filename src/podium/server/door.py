"""The outermost layer of the server: sockets, deadlines, the token and the limits of a request.

Every path and method needs the token except GET and HEAD of /health, so a route that is added later is closed too. The
door keeps only the token's hash and compares hashes in constant time. A request must be JSON of bounded size, depth and
numbers, and it must arrive in bounded time; all of this is checked before anything is parsed. uvicorn has no deadline
for a header or for an answer that a client does not read, so its HTTP protocol gets both here.
"""

import asyncio
import hashlib
import hmac
import json
import os
import re
import resource
import signal
import socket
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from podium.errors import InputError

OPENAI_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """`message` goes to the client, so it contains no secret and no path of this machine. `param` (the field at fault)
    and `code` (a word for programs) are for OpenAI's clients."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self, path: str) -> dict[str, Any]:
        """In the form that clients of that path expect."""
        if not path.startswith("/v1/"):
            return {"error": self.message}
        kind = OPENAI_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


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
"""Of the request line and all headers. h11 refuses longer ones while they arrive; `check_size` refuses one that arrives
in a single piece, which h11 accepts."""
HEADER_S = 10.0
"""From a connection, or the end of an answer on it, to a complete header."""
BODY_S = 20.0
SEND_S = 60.0
"""How long a client may leave its answer unread."""
LINGER_S = 1.0
"""So long a refused client may go on sending; otherwise it sees a broken connection instead of the reason."""
MAX_CONNECTIONS = 2048
MAX_SOCKET_PATH = 100
"""Bytes; the system allows about 107."""

STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""Also matches a string that does not end; otherwise the search would try each quote in it."""
LONG_NUMBER = re.compile(rb"\d{%d}" % (MAX_DIGITS + 1))
BRACKET = re.compile(rb"[\[\]{}]")


def check_size(scope: Mapping[str, Any]) -> None:
    line = len(scope["method"]) + len(scope.get("raw_path") or scope["path"]) + len(scope.get("query_string", b""))
    if line + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > MAX_HEADER_BYTES:
        raise Refusal(431, f"the request line and the headers have more than {MAX_HEADER_BYTES} bytes")


def check_head(method: str, headers: Mapping[bytes, bytes]) -> None:
    """Only a POST has a body: uncompressed JSON."""
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
    """Bounds the cost of parsing. The parser finds out whether it is JSON at all."""
    try:
        body.decode()
    except UnicodeDecodeError:
        raise Refusal(400, "the body is not UTF-8 text") from None
    if b"\0" in body:
        raise Refusal(400, "the body is not UTF-8 text")
    too_many = Refusal(413, f"the body has more than {MAX_VALUES} values or {MAX_STRINGS} texts")
    if body.count(b'"') - body.count(b'\\"') > 2 * MAX_STRINGS:
        raise too_many  # before the pattern searches millions of them
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


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


class Door:
    """ASGI around `app`. `token` is the hash of the valid token; None lets every client in (a private socket)."""

    def __init__(self, app: Any, token: bytes | None, count: Callable[[str, int], None], log: Callable[[str], None]):
        self.app, self._token, self._count, self._log = app, token, count, log

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
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
    """Sends an answer and notes its status, which is None before the answer begins."""

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
        body = json.dumps(refusal.body(self._path)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            *{401: [(b"www-authenticate", b"Bearer")], 503: [(b"retry-after", b"1")]}.get(refusal.status, []),
        ]
        await self.send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await receive()).get("more_body", False):
                    pass
        await self._send({"type": "http.response.body", "body": b""})


def _where(error: BaseException) -> str:
    """The kind of error and the function that raised it. A log must not contain more."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} in {frames[-1].name}, line {frames[-1].lineno}" if frames else type(error).__name__


class PatientProtocol(H11Protocol):
    """Disconnects a client that does not finish its header, or does not read its answer."""

    _header_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(HEADER_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_idle = self.cycle is None or self.cycle.response_complete
        if not is_idle and self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        if is_idle and self._header_timer is None and not self.transport.is_closing():
            self._header_timer = self.loop.call_later(HEADER_S, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timer = self.loop.call_later(SEND_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._send_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)


def tcp_socket(host: str, port: int) -> socket.socket:
    """Bound and not yet listening, so clients are refused until the model is loaded."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError) as error:
        raise InputError(f"--host {host} --port {port}: {error}") from None
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, OverflowError) as error:
        made.close()
        raise InputError(f"--host {host} --port {port}: {error}") from None
    return made


def url_of(listener: socket.socket) -> str:
    """The address for clients."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def unix_socket(path: Path) -> socket.socket:
    """Open to this user alone from its creation. A socket on which no server listens any more is replaced."""
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise InputError(f"--uds: the path of a socket has at most {MAX_SOCKET_PATH} bytes; give a shorter one")
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.connect(str(path))
            raise InputError(f"--uds {path}: another server listens there")
        path.unlink()
    made, before = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), os.umask(0o177)
    try:
        made.bind(str(path))
    except OSError as error:
        made.close()
        raise InputError(f"--uds {path}: {error.strerror or error}") from None
    finally:
        os.umask(before)
    return made


def _exit(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


def listen(app: Any, listener: socket.socket, started: Callable[[], Awaitable[None]]) -> None:
    """Serves until a signal; awaits `started` before it accepts the first request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * MAX_CONNECTIONS)), hard))
    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        lifespan="off",
        log_level="critical",
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)

    # uvicorn raises the signal again at its end; the default action would end the process before the clean-up.
    signal.signal(signal.SIGTERM, _exit)

    async def serve() -> None:
        await started()
        await server.serve(sockets=[listener])

    asyncio.run(serve())
