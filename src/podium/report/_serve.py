"""`podium report`: the page of a run, or of a folder of runs, live on this machine alone.

    /  the page      /data.json  what it draws      /rollouts/12  every rollout of a step
    of a folder of runs the same below /run/NAME/

It reads the run folder and writes nothing. Only requests that name this machine are answered, so that no web page in
the same browser can reach it by a name of its own.
"""

import io
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from podium.errors import InputError
from podium.report._reader import RunReader
from podium.report._render import render, to_json
from podium.report._runs import find_runs, runs_data
from podium.run_folder import RunFolder

HOST = "127.0.0.1"
USUAL_PORT = 8787
REQUEST_S = 20.0
"""From a connection, or the end of an answer on it, to a whole request."""
SEND_S = 60.0
"""How long a client may take to read an answer."""


class Patience(io.RawIOBase):
    """Reads from a socket until a deadline, however slowly the bytes come."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._deadline = connection, 0.0

    def start(self) -> None:
        self._deadline = time.monotonic() + REQUEST_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class LiveRun:
    """One run; requests come from several threads."""

    def __init__(self, path: Path) -> None:
        self.reader = RunReader(RunFolder(path))
        self.lock = threading.Lock()

    def version(self) -> str:
        """Changes whenever something new could be shown."""
        folder = self.reader.folder
        files = (folder.metrics, folder.events, folder.path / "status.json", folder.settings)
        stats = [path.stat() if path.exists() else None for path in files]
        return "-".join(f"{stat.st_size:x}.{stat.st_mtime_ns:x}" if stat else "" for stat in stats) + (
            "r" if folder.is_locked() else ""
        )

    def data(self) -> dict[str, Any]:
        with self.lock:
            self.reader.refresh()
            return self.reader.data() | {"live": True}

    def step_rollouts(self, step: int) -> dict[str, Any]:
        with self.lock:
            return self.reader.step_rollouts(step)


class Site:
    """What is served, by path: a run, or a folder of runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_run = (path / "settings.toml").is_file()
        self._runs: dict[str, LiveRun] = {"": LiveRun(path)} if self._is_run else {}
        if not self._is_run:
            self._find()
            if not self._runs:
                raise InputError(
                    f"{path} is no run folder, and none is in it: it has no settings.toml, nor */settings.toml"
                )

    def answer(self, path: str) -> tuple[str, str, Callable[[], str]] | None:
        """(kind, version, body) of a path; None where nothing is there."""
        if self._is_run:
            return self._run_answer(self._runs[""], path, {})
        found = re.fullmatch(r"/run/(.+?)(/(?:|data\.json|rollouts/\d{1,9}))", path)
        if found is not None:
            run = self._runs.get(unquote(found[1]))
            home = "../" * (2 + unquote(found[1]).count("/"))
            return None if run is None else self._run_answer(run, found[2], {"home": home})
        if path in ("/", "/data.json"):
            self._find()
            version = "+".join(f"{name}:{run.version()}" for name, run in self._runs.items())
            return self._page_or_data(path, version, self._all_runs)
        return None

    def _run_answer(self, run: LiveRun, path: str, extra: dict[str, Any]) -> tuple[str, str, Callable[[], str]] | None:
        if found := re.fullmatch(r"/rollouts/(\d{1,9})", path):
            return "application/json", "", lambda: to_json(run.step_rollouts(int(found[1])))
        return self._page_or_data(path, run.version(), lambda: run.data() | extra)

    def _page_or_data(
        self, path: str, version: str, data: Callable[[], dict[str, Any]]
    ) -> tuple[str, str, Callable[[], str]] | None:
        if path == "/":
            return "text/html", "", lambda: render(data())
        return ("application/json", version, lambda: to_json(data())) if path == "/data.json" else None

    def _all_runs(self) -> dict[str, Any]:
        for run in self._runs.values():
            with run.lock, suppress(Exception):  # what cannot be refreshed is shown as it was
                run.reader.refresh()
        return runs_data(self._path, {name: run.reader for name, run in self._runs.items()}) | {"live": True}

    def _find(self) -> None:
        """Runs that began since are found too."""
        self._runs = {name: self._runs.get(name) or LiveRun(path) for name, path in find_runs(self._path).items()}


class Handler(BaseHTTPRequestHandler):
    site: Site
    protocol_version = "HTTP/1.1"
    server_version = "podium"

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._patience = Patience(self.connection)
        self.rfile = io.BufferedReader(self._patience)

    def handle_one_request(self) -> None:
        """Cuts a client that does not finish its request in time; each request has a time of its own."""
        self._patience.start()
        super().handle_one_request()

    def do_GET(self) -> None:
        try:
            self._answer()
        except OSError:  # the client is gone, or too slow
            raise
        except Exception as error:
            told = f"this page cannot be made: {type(error).__name__}: {error}"
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", told[:1000])

    do_HEAD = do_GET

    def _answer(self) -> None:
        port = self.connection.getsockname()[1]
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", "ask by 127.0.0.1 or localhost")
        answer = self.site.answer(urlsplit(self.path).path)
        if answer is None:
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", "nothing here")
        kind, version, body = answer
        if version and self.headers.get("If-None-Match") == f'"{version}"':
            return self._send(HTTPStatus.NOT_MODIFIED, kind, "", version)
        return self._send(HTTPStatus.OK, kind, body(), version)

    def _send(self, status: HTTPStatus, kind: str, body: str, version: str = "") -> None:
        content = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        if version:
            self.send_header("ETag", f'"{version}"')
        self.connection.settimeout(SEND_S)  # of all of it: `sendall` counts from its start
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal is not for every request."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closed its window is no error."""


def report_server(path: Path, port: int | None = None) -> Server:
    """Ready to `serve_forever`; without a port the usual one, or any free one where that is taken."""
    if not path.is_dir():
        raise InputError(f"{path} is no folder; give a run folder, or a folder of runs")
    handler = type("SiteHandler", (Handler,), {"site": Site(path)})
    for choice in (USUAL_PORT, 0) if port is None else (port,):
        try:
            return Server((HOST, choice), handler)
        except OSError as error:
            if choice == 0 or port is not None:
                raise InputError(f"--port {choice} cannot be used: {error.strerror}; 0 takes any free one") from None
    raise AssertionError("the last choice either works or raises")
