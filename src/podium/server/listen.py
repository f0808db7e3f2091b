"""The socket and the HTTP protocol under the app: uvicorn with deadlines that it does not have itself."""

import asyncio
import os
import resource
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from podium.errors import InputError
from podium.server.door import HEADER_S, MAX_CONNECTIONS, MAX_HEADER_BYTES, SEND_S

MAX_SOCKET_PATH = 100
"""Bytes; the system allows about 107."""


class PatientProtocol(H11Protocol):
    """Cuts a client that does not finish its header, or does not read its answer."""

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
    """Bound and not yet listening: a client is turned away until the model is there."""
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
    """As a client is to be told."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def unix_socket(path: Path) -> socket.socket:
    """Open to this user alone from the moment it is there. One that nobody listens on any more is taken over."""
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
    """Serves until a signal; `started` is awaited before the first request is taken."""
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

    # uvicorn raises the signal again when it is done; the default would end the process before it has cleaned up.
    signal.signal(signal.SIGTERM, _exit)

    async def serve() -> None:
        await started()
        await server.serve(sockets=[listener])

    asyncio.run(serve())
