"""HTTP to one engine server, by a port or a unix socket, where every wait has a deadline and every failure a name."""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx

from podium.errors import BusyError, EngineError, InputError, WeightsError

RETRIES = 2
BACKOFF_S = 0.2
CONNECT_FAILURES = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class Connection:
    """`timeout_s` bounds a whole call, `silence_s` the time without a byte while answers are streamed."""

    def __init__(self, url: str, token: str | None, timeout_s: float, silence_s: float, calls: int) -> None:
        if not url.startswith(("http://", "https://", "unix:")):
            raise InputError(f"engine.url = {url!r}: give http://host:port, https://host:port or unix:/path/of/socket")
        self.url, self._token = url, token
        self._timeout_s, self._silence_s = timeout_s, silence_s
        self._calls = calls
        self._client: tuple[Any, httpx.AsyncClient] | None = None
        """With the event loop that it belongs to."""

    def ask(self, method: str, path: str, body: Any = None, timeout_s: float = 30.0) -> Any:
        """One call without an event loop."""
        transport = httpx.HTTPTransport(uds=self._socket)
        with httpx.Client(transport=transport, **self._options(timeout_s)) as client:
            for attempt in range(RETRIES + 1):
                try:
                    self._knock()
                    return self._checked(client.request(method, path, json=body))
                except httpx.HTTPError as error:
                    if attempt == RETRIES or not isinstance(error, CONNECT_FAILURES):
                        raise self._broken(error) from None
        raise AssertionError("unreachable")

    def _knock(self) -> None:
        """A unix socket that nobody listens on; httpx would leave its end of it open."""
        if self._socket is None:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(10.0)
            try:
                probe.connect(self._socket)
            except OSError as error:
                raise httpx.ConnectError(error.strerror or str(error)) from None

    async def post(self, path: str, body: Any, retries: int = RETRIES) -> Any:
        """One call; with `retries` one that may be made twice, because its effect is the same."""
        for attempt in range(retries + 1):
            try:
                async with asyncio.timeout(self._timeout_s):
                    response = await self._open().post(path, json=body)
                if response.status_code != 503 or attempt == retries:
                    return self._checked(response)
            except (httpx.HTTPError, TimeoutError) as error:
                if attempt == retries or isinstance(error, TimeoutError):
                    raise self._broken(error) from None
            await asyncio.sleep(BACKOFF_S * 2**attempt)
        raise AssertionError("unreachable")

    async def stream(self, path: str, body: Any) -> AsyncGenerator[Any]:
        """The lines of an answer. A call that was not taken is made again; one that broke off is an error."""
        for attempt in range(RETRIES + 1):
            has_begun = False
            try:
                async with asyncio.timeout(self._timeout_s), self._call(path, body) as response:
                    if response.status_code == 503 and attempt < RETRIES:
                        raise httpx.ConnectError("busy")
                    if response.status_code != 200:
                        await response.aread()
                        self._checked(response)
                    has_begun = True
                    async for line in response.aiter_lines():
                        if line:
                            yield self._parsed(line)
                    return
            except (httpx.HTTPError, TimeoutError) as error:
                if has_begun or attempt == RETRIES or not isinstance(error, CONNECT_FAILURES):
                    raise self._broken(error) from None
            await asyncio.sleep(BACKOFF_S * 2**attempt)

    def _call(self, path: str, body: Any) -> contextlib.AbstractAsyncContextManager[httpx.Response]:
        timeout = httpx.Timeout(self._silence_s, connect=min(10.0, self._silence_s), pool=self._timeout_s)
        return self._open().stream("POST", path, json=body, timeout=timeout)

    def _open(self) -> httpx.AsyncClient:
        """One client an event loop: connections cannot go from one to another."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            # Calls are few and long: none waits for a connection that the server has just closed.
            limits = httpx.Limits(max_connections=self._calls, max_keepalive_connections=0)
            transport = httpx.AsyncHTTPTransport(uds=self._socket, limits=limits)
            self._client = (loop, httpx.AsyncClient(transport=transport, **self._options(self._timeout_s)))
        return self._client[1]

    async def close(self) -> None:
        """Closes what this event loop has open; it is opened again when it is needed."""
        if self._client is not None and self._client[0] is asyncio.get_running_loop():
            _, client = self._client
            self._client = None
            await client.aclose()

    def _options(self, timeout_s: float) -> dict[str, Any]:
        headers = {} if self._token is None else {"authorization": f"Bearer {self._token}"}
        return {
            "base_url": "http://engine" if self._socket else self.url,
            "headers": headers,
            "timeout": httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)),
            "trust_env": False,  # an engine is asked directly, and never by way of a proxy
        }

    @property
    def _socket(self) -> str | None:
        return self.url.removeprefix("unix:") if self.url.startswith("unix:") else None

    def _checked(self, response: httpx.Response) -> Any:
        if response.status_code == 200:
            return self._parsed(response.text)
        try:
            told = str(response.json()["error"])[:500]
        except (ValueError, KeyError, TypeError):
            told = "no reason given"
        status, path, kind = response.status_code, response.request.url.path, EngineError
        if status == 401:
            raise InputError(
                f"engine {self.url} does not accept the token; give engine.token_file or engine.token_env the token "
                "that the server was started with"
            )
        if path == "/reload_weights" and status in (403, 404, 422):
            kind = WeightsError
        elif status == 503:
            kind = BusyError
        elif status in (400, 413, 415, 422) or (path == "/claim" and status == 409):
            kind = InputError  # a claim that was lost later is the engine's doing
        raise kind(f"engine {self.url} answered {status}: {told}")

    def _parsed(self, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            raise EngineError(f"engine {self.url} sent what is no JSON") from None

    def _broken(self, error: Exception) -> EngineError:
        if isinstance(error, (TimeoutError, httpx.TimeoutException)):
            return EngineError(f"engine {self.url} did not answer in time ({type(error).__name__})")
        return EngineError(f"engine {self.url} cannot be reached or broke off: {type(error).__name__}: {error}")


def token_of(file: Path | None, variable: str | None) -> str | None:
    """From a file or an environment variable; the settings hold only where it is."""
    if file is not None and variable is not None:
        raise InputError("engine.token_file and engine.token_env both say where the token is; remove one")
    if variable is not None:
        if not os.environ.get(variable):
            raise InputError("engine.token_env names no environment variable that is set; put the token into one")
        return os.environ[variable].strip()
    if file is None:
        return None
    try:
        return file.expanduser().read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        raise InputError(f"engine.token_file = {str(file)!r}: no file of ASCII text that can be read") from None
