"""A real OpenAI-compatible endpoint on this machine, which answers as it is told."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """What the server sends: a completion with `content`, or the raw `body`."""

    content: str | None = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    delay_s: float = 0.0
    usage: Any = field(default_factory=lambda: {"prompt_tokens": 100, "completion_tokens": 20})

    def encoded(self) -> bytes:
        if self.body is not None:
            return self.body
        return json.dumps({"choices": [{"message": {"content": self.content}}], "usage": self.usage}).encode()


@dataclass
class Server:
    """`respond(number, text)` makes the reply to the request of that number, from 1 on."""

    respond: Callable[[int, str], Reply]
    base_url: str = ""
    texts: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, path: str, key: str | None, body: dict[str, Any]) -> Reply:
        text = body["messages"][0]["content"]
        with self.lock:
            self.texts.append(text)
            self.bodies.append(body)
            self.keys.append(key)
            self.times.append(time.monotonic())
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            number = len(self.texts)
        reply = (
            self.respond(number, text) if path == "/v1/chat/completions" else Reply(status=404, body=b"no such path")
        )
        time.sleep(reply.delay_s)
        with self.lock:
            self.under_way -= 1
        return reply


def mark_in(text: str) -> str:
    """The mark that a well-behaved judge copies."""
    found = re.search(r"<answer-([0-9a-f]{8})>", text)
    assert found is not None
    return found[1]


def answer_in(text: str) -> str:
    mark = mark_in(text)
    return text.partition(f"<answer-{mark}>\n")[2].rpartition(f"\n</answer-{mark}>")[0]


def verdict(text: str, score: Any) -> str:
    return f"Well.\n{json.dumps({'id': mark_in(text), 'score': score})}"


class PatientServer(ThreadingHTTPServer):
    request_queue_size = 128
    """Connections that may wait: a whole step asks at once, and one that is refused would be a retry."""


@contextmanager
def serving(respond: Callable[[int, str], Reply]) -> Iterator[Server]:
    state = Server(respond)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = state.take(self.path, self.headers["Authorization"], body)
            content = reply.encoded()
            try:
                self.send_response(reply.status)
                for name, value in {**reply.headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)
            except (BrokenPipeError, ConnectionResetError):  # the client has given up
                pass

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = PatientServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    state.base_url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
