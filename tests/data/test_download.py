"""JSON Lines from a real server on this machine."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from podium.data.jsonl import jsonl
from podium.errors import InputError

ROWS = b"".join(json.dumps({"prompt": f"What is 1 + {n}?", "answer": n + 1}).encode() + b"\n" for n in range(5000))


class Handler(BaseHTTPRequestHandler):
    """Each path misbehaves in its own way."""

    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/rows")
            self.end_headers()
        elif self.path == "/rows":
            self.answer(ROWS, len(ROWS))
        elif self.path == "/unsaid":
            self.answer(ROWS, None)
        elif self.path == "/broken-off":
            self.answer(ROWS, len(ROWS) + 7)
        elif self.path == "/bad-row":
            self.answer(b'{"prompt": "a"}\n{"prompt": 3}\n', None)
        elif self.path == "/silent":
            self.answer(b'{"prompt":', 1000)
            self.server.released.wait(20)  # type: ignore[attr-defined]
        elif self.path == "/nonsense":
            self.wfile.write(b"what?\r\n\r\n")
        else:
            self.send_error(404, "Not here")

    def answer(self, content: bytes, length: int | None) -> None:
        self.send_response(200)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.daemon_threads = True
        running.released = threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.released.set()  # type: ignore[attr-defined]
        running.shutdown()


@pytest.mark.parametrize("path", ["rows", "unsaid", "moved"])
def test_rows_come_from_a_url_as_from_a_file(server: str, path: str) -> None:
    rows = jsonl(path=f"{server}/{path}")
    assert len(rows) == 5000
    assert (rows[7].messages[0]["content"], rows[7].answer) == ("What is 1 + 7?", 8)


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("none", "/none': the server says 404 Not here"),
        ("broken-off", f"/broken-off' broke off after {len(ROWS):,} of {len(ROWS) + 7:,} bytes"),
        ("nonsense", "/nonsense' cannot be read: what?"),
        ("bad-row", "/bad-row has 1 bad row; fix or remove it:\n  row 2: 'prompt' must be a text"),
    ],
)
def test_what_goes_wrong_at_a_server_is_told_in_one_message(server: str, path: str, complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        jsonl(path=f"{server}/{path}")
    assert complaint in str(caught.value)
    assert str(caught.value).count(server) == 1


def test_a_server_that_falls_silent_is_given_up(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.data.jsonl.STALL_S", 0.3)
    started = time.monotonic()
    with pytest.raises(InputError, match=r"/silent': the server sent nothing for 0\.3 s"):
        jsonl(path=f"{server}/silent")
    assert time.monotonic() - started < 30


def test_a_file_that_is_too_large_is_refused_whatever_the_server_says_of_its_length(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podium.data.jsonl.MAX_BYTES", 1000)
    with pytest.raises(InputError, match="/unsaid' has more than 1,000 bytes; download it, cut it and give the file"):
        jsonl(path=f"{server}/unsaid")


def test_a_download_has_a_time_limit(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.data.jsonl.MAX_S", 0.0)
    with pytest.raises(InputError, match="/rows' was not read within 0 s"):
        jsonl(path=f"{server}/rows")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/rows.jsonl", "http://no.such.host.invalid/a", "http://", "http://[", "https://a b/c"]
)
def test_a_server_that_is_not_there_is_told(url: str) -> None:
    with pytest.raises(InputError) as caught:
        jsonl(path=url)
    assert str(caught.value).startswith(f"data.path = {url!r} cannot be read: ")


def test_other_schemes_are_no_files(tmp_path) -> None:
    with pytest.raises(InputError, match="no such file"):
        jsonl(path=f"file://{tmp_path}")
