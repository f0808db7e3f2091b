"""`podium report`: a live page of a run, or of a folder of runs, on this machine only.

    /  the page      /data.json  its data      /rollouts/12  every rollout of step 12
    for a folder of runs, the same paths below /run/NAME/

The server reads the run folder and writes nothing. It answers only requests whose Host is this machine, so that another
web page in the same browser cannot reach it through a DNS name of its own.
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
from urllib.parse import quote, unquote, urlsplit

from podium.errors import InputError
from podium.report.page import explanations, page_data, render, to_json
from podium.report.web.reader import LAPS, RunReader, Series, run_card
from podium.run.folder import RunFolder, flattened

HOST = "127.0.0.1"
USUAL_PORT = 8787
REQUEST_S = 20.0
"""A client must send a complete request within this time after connecting, or after the previous answer."""
SEND_S = 60.0
"""How long a client may take to read an answer."""
MAX_POINTS = 300
"""Points per curve on the page of several runs."""
OVERLAID = (
    "reward/mean",
    "reward/correct_rate",
    "loss/total",
    "policy/entropy",
    "rollout/length_mean",
    "mismatch/abs_mean",
    "batch/kept_ratio",
)


def find_runs(folder: Path) -> dict[str, Path]:
    """Run folders one or two levels below `folder`, by their path relative to it."""
    found = sorted([*folder.glob("*/settings.toml"), *folder.glob("*/*/settings.toml")])
    return {str(path.parent.relative_to(folder)): path.parent for path in found}


class DeadlineReader(io.RawIOBase):
    """Reads from a socket until a deadline, however slowly the bytes arrive."""

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
    """The reader of one run, behind a lock: requests come from several threads."""

    def __init__(self, path: Path) -> None:
        self._reader = RunReader(RunFolder(path))
        self._lock = threading.Lock()

    def version(self) -> str:
        """Changes whenever the page may have something new to show."""
        folder = self._reader.folder
        files = (folder.metrics, folder.events, folder.path / "status.json", folder.settings)
        stats = [path.stat() if path.exists() else None for path in files]
        sizes = [f"{stat.st_size:x}.{stat.st_mtime_ns:x}" if stat else "" for stat in stats]
        return "-".join(sizes) + ("r" if folder.is_locked() else "")

    def data(self) -> dict[str, Any]:
        with self._lock:
            self._reader.refresh()
            return page_data(self._reader) | {"live": True}

    def step_rollouts(self, step: int) -> dict[str, Any]:
        with self._lock:
            return self._reader.step_rollouts(step)

    def row(self, name: str) -> dict[str, Any]:
        """The run's part of the page of several runs. A run that cannot be shown appears with its error."""
        reader = self._reader
        row: dict[str, Any] = {"name": name, "link": f"run/{quote(name)}/"}
        with self._lock:
            try:
                with suppress(Exception):  # a run that cannot be refreshed is shown as it was before
                    reader.refresh()
                status = reader.status()
                row |= {"card": reader.card(status), "status": status, "settings": flattened(reader.settings())}
                return row | {"series": _overlaid(reader.series).sampled(MAX_POINTS), "evals": reader.evals}
            except Exception as error:
                status = {"state": "unreadable", "message": f"{type(error).__name__}: {error}"}
                row |= {"card": run_card({}, reader.folder.path, 0), "status": status, "settings": {}}
                return row | {"series": Series().sampled(MAX_POINTS), "evals": []}


def _overlaid(series: Series) -> Series:
    """The metrics that are compared between runs, and the seconds per step."""
    overlaid = Series()
    columns = {metric: series.column(metric) for metric in OVERLAID}
    laps = [series.column(f"time/{stage}_s") for stage in LAPS]
    for place, step in enumerate(series.steps):
        line = {metric: value for metric, values in columns.items() if (value := values[place]) is not None}
        overlaid.add({"step": step, **line, "time/step_s": sum(values[place] or 0.0 for values in laps)})
    return overlaid


Answer = tuple[str, str, Callable[[], str]]
"""Content type, version (empty if the client must not cache it) and body."""


class Site:
    """Maps request paths to answers, for a run or a folder of runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_run = (path / "settings.toml").is_file()
        self._runs: dict[str, LiveRun] = {"": LiveRun(path)} if self._is_run else {}
        if not self._is_run:
            self._find()
            if not self._runs:
                raise InputError(
                    f"{path} is not a run folder and contains none: there is no settings.toml and no */settings.toml"
                )

    def answer(self, path: str) -> Answer | None:
        """None if the path does not exist."""
        if self._is_run:
            return self._run_answer(self._runs[""], path, {})
        if found := re.fullmatch(r"/run/(.+?)(/(?:|data\.json|rollouts/\d{1,9}))", path):
            name = unquote(found[1])
            home = {"home": "../" * (2 + name.count("/"))}
            return self._run_answer(self._runs[name], found[2], home) if name in self._runs else None
        if path not in ("/", "/data.json"):
            return None
        self._find()
        version = "+".join(f"{name}:{run.version()}" for name, run in self._runs.items())
        return _page_or_data(path, version, self._all_runs)

    def _run_answer(self, run: LiveRun, path: str, extra: dict[str, Any]) -> Answer | None:
        if found := re.fullmatch(r"/rollouts/(\d{1,9})", path):
            return "application/json", "", lambda: to_json(run.step_rollouts(int(found[1])))
        return _page_or_data(path, run.version(), lambda: run.data() | extra)

    def _all_runs(self) -> dict[str, Any]:
        """The data of the page of several runs: their curves for an overlay, their settings for a comparison."""
        runs = [run.row(name) for name, run in self._runs.items()]
        words = explanations((*OVERLAID, "eval/accuracy"))
        return {"folder": str(self._path), "runs": runs, "words": words, "live": True}

    def _find(self) -> None:
        """Looks for runs again, so that new ones appear."""
        self._runs = {name: self._runs.get(name) or LiveRun(path) for name, path in find_runs(self._path).items()}


def _page_or_data(path: str, version: str, data: Callable[[], dict[str, Any]]) -> Answer | None:
    if path == "/":
        return "text/html", "", lambda: render(data())
    return ("application/json", version, lambda: to_json(data())) if path == "/data.json" else None


class Handler(BaseHTTPRequestHandler):
    site: Site
    protocol_version = "HTTP/1.1"
    server_version = "podium"

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._request_reader = DeadlineReader(self.connection)
        self.rfile = io.BufferedReader(self._request_reader)

    def handle_one_request(self) -> None:
        """Disconnects a client that does not finish its request in time; each request has its own deadline."""
        self._request_reader.start()
        super().handle_one_request()

    def do_GET(self) -> None:
        try:
            self._answer()
        except OSError:  # the client is gone, or too slow
            raise
        except Exception as error:
            message = f"this page cannot be made: {type(error).__name__}: {error}"
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", message[:1000])

    do_HEAD = do_GET

    def _answer(self) -> None:
        port = self.connection.getsockname()[1]
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", "open this page as 127.0.0.1 or localhost")
        answer = self.site.answer(urlsplit(self.path).path)
        if answer is None:
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", "not found")
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
        self.connection.settimeout(SEND_S)  # for the whole answer: `sendall` counts from its start
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing: one line per request would flood the terminal."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors: a closed browser window is not a problem."""


def report_server(path: Path, port: int | None = None) -> Server:
    """A server ready to `serve_forever`. Without `port` it takes the usual port, or any free one if that is taken."""
    if not path.is_dir():
        raise InputError(f"{path} is not a folder; give a run folder, or a folder of runs")
    handler = type("SiteHandler", (Handler,), {"site": Site(path)})
    for choice in (USUAL_PORT, 0) if port is None else (port,):
        try:
            return Server((HOST, choice), handler)
        except OSError as error:
            if choice == 0 or port is not None:
                raise InputError(f"--port {choice} cannot be used: {error.strerror}; 0 takes any free one") from None
    raise AssertionError("the last choice either works or raises")
