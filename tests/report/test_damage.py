"""Run folders that somebody else has written to: the page is made all the same, and says what it left out."""

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from podium.report.page import page_data, render, to_json
from podium.report.web.reader import RunReader
from tests.report.runs import make_run
from tests.report.test_serve import Serve, ask
from tests.report.test_serve import serve as serve

BIG = "9" * 400


def append(name: str, *lines: str) -> Callable[[Path], None]:
    def add(run: Path) -> None:
        with (run / name).open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))

    return add


def edit_rollout(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        path = run / "rollouts" / "step-000002.jsonl"
        line = json.loads(path.read_text().splitlines()[0])
        changed = change(line)
        path.write_text(path.read_text() + json.dumps(line if changed is None else changed) + "\n")

    return edit


def put_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda run: (run / name).write_text(text) and None


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "NaN in metrics": (append("metrics.jsonl", '{"step": 3, "reward/mean": NaN, "loss/total": -Infinity}'), ""),
    "1e999 in metrics": (append("metrics.jsonl", '{"step": 3, "reward/mean": 1e999}'), ""),
    "NaN in an evaluation": (append("metrics.jsonl", '{"step": 3, "eval": true, "eval/accuracy": NaN}'), ""),
    "an integer beyond floats": (append("metrics.jsonl", f'{{"step": 3, "reward/mean": {BIG}}}'), ""),
    "no step": (append("metrics.jsonl", '{"reward/mean": 1.0}'), "1 of metrics.jsonl"),
    "a step in words": (append("metrics.jsonl", '{"step": "three"}', '{"step": null}'), "2 of metrics.jsonl"),
    "a step beyond 64 bits": (append("metrics.jsonl", f'{{"step": {BIG}}}'), "1 of metrics.jsonl"),
    "an evaluation without a step": (append("metrics.jsonl", '{"eval": true}'), "1 of metrics.jsonl"),
    "a list in metrics": (append("metrics.jsonl", "[1]", "3", "null"), "3 of metrics.jsonl"),
    "deep metrics": (append("metrics.jsonl", "[" * 100_000), "1 of metrics.jsonl"),
    "bytes in metrics": (lambda run: (run / "metrics.jsonl").write_bytes(b"\xff\xfe\n") and None, "1 of metrics.jsonl"),
    "an event of lists": (append("events.jsonl", '{"event": ["failed"], "error": ["x"]}'), "1 of events.jsonl"),
    "an error that is a list": (append("events.jsonl", '{"event": "failed", "error": ["x"]}'), "1 of events.jsonl"),
    "NaN in an event": (append("events.jsonl", '{"event": "note", "value": NaN}'), ""),
    "a time that is a text": (append("events.jsonl", '{"event": "failed", "time": "now"}'), "1 of events.jsonl"),
    "a rollout without keys": (edit_rollout(lambda line: {"text": "x"}), "1 of rollouts/step-000002.jsonl"),
    "a rollout without a reward": (edit_rollout(lambda line: line.pop("reward") and None), "step-000002.jsonl"),
    "a rollout of NaN": (edit_rollout(lambda line: line.update(reward=float("nan"))), ""),
    "logprobs of NaN": (edit_rollout(lambda line: line.update(logprobs=[float("nan")])), "step-000002.jsonl"),
    "ids in words": (edit_rollout(lambda line: line.update(token_ids=["a"])), "step-000002.jsonl"),
    "ids that are no list": (edit_rollout(lambda line: line.update(token_ids=3)), "step-000002.jsonl"),
    "a prompt that is a list": (edit_rollout(lambda line: line.update(prompt=[1])), "step-000002.jsonl"),
    "gaps that are a number": (edit_rollout(lambda line: line.update(logprob_gaps=1)), "step-000002.jsonl"),
    "tokens of lists": (append("tokens.jsonl", "", "[1, 2]", '"x"', "3"), ""),
    "tokens that are no ids": (append("tokens.jsonl", "", '{"x": "y"}', "{"), ""),
    "tokens beyond ASCII": (append("tokens.jsonl", "", '{"5": "é"}'), ""),
    "a status of lists": (write("status.json", '{"state": [], "step": {}, "steps": "x", "message": 3}'), ""),
    "NaN in the status": (write("status.json", '{"state": "failed", "step": NaN, "percent": NaN}'), ""),
    "a status that is a list": (write("status.json", "[]"), ""),
    "settings without tables": (write("settings.toml", 'run = 3\nmodel = []\nloss = "x"\ntrainer = 1\n'), ""),
    "NaN in settings": (write("settings.toml", "[trainer]\nlr = nan\n[run]\nsteps = inf\n"), ""),
    "settings that are no TOML": (write("settings.toml", "]]]["), ""),
    "a folder as metrics": (
        lambda run: put_folder(run / "metrics.jsonl"),
        "",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_page_of_a_damaged_run_is_made_and_says_what_is_left_out(name: str, tmp_path: Path, serve: Serve) -> None:
    for run in ("good", "odd"):
        make_run(tmp_path / run, steps=2, texts=["a", "b"])
    damage, told = DAMAGE[name]
    damage(tmp_path / "odd")
    port = serve(tmp_path)
    for path in ("/", "/data.json", "/run/odd/", "/run/odd/data.json", "/run/odd/rollouts/2", "/run/good/data.json"):
        status, _, body = ask(port, path)
        assert status == 200, (path, body)
        if not path.endswith("/"):
            json.loads(body, parse_constant=pytest.fail)
    verdicts = json.loads(ask(port, "/run/odd/data.json")[2])["health"]
    left_out = [verdict["text"] for verdict in verdicts if verdict["title"] == "Some lines could not be read"]
    assert bool(left_out) == bool(told)
    assert told in "".join(left_out)


def test_a_good_run_has_no_complaint(tmp_path: Path) -> None:
    reader = RunReader(make_run(tmp_path / "good"))
    reader.refresh()
    titles = [verdict["title"] for verdict in page_data(reader)["health"]]
    assert titles
    assert "Some lines could not be read" not in titles


def test_what_cannot_be_shown_at_all_is_told_and_the_other_runs_are_there(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in ("good", "odd"):
        make_run(tmp_path / run, steps=2, texts=["a"])
    whole = RunReader.card

    def card(self: RunReader, status: dict[str, Any]) -> dict[str, Any]:
        if self.folder.path.name == "odd":
            raise KeyError("something that nobody thought of")
        return whole(self, status)

    monkeypatch.setattr(RunReader, "card", card)
    port = serve(tmp_path)
    status, _, body = ask(port, "/run/odd/data.json")
    assert (status, b"KeyError" in body) == (500, True)
    runs = {run["name"]: run for run in json.loads(ask(port, "/data.json")[2])["runs"]}
    assert runs["good"]["status"]["state"] == "finished"
    assert runs["odd"]["status"]["state"] == "unreadable"
    assert "something that nobody thought of" in runs["odd"]["status"]["message"]
    assert set(runs["odd"]) == set(runs["good"])


def test_a_number_that_is_none_is_null_on_a_page() -> None:
    assert to_json({"a": [float("nan"), 1.0, {"b": float("inf")}]}) == '{"a":[null,1.0,{"b":null}]}'
    assert '{"value":null}' in render({"value": float("nan")})


@pytest.mark.parametrize("sent", [b"", b"GET / HTT", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_a_client_that_does_not_finish_its_request_is_cut(
    sent: bytes, tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podium.report.web.serve.REQUEST_S", 0.3)
    make_run(tmp_path / "run")
    with socket.create_connection(("127.0.0.1", serve(tmp_path)), timeout=60) as client:
        client.sendall(sent)
        assert client.recv(4096) == b""


def test_a_client_that_sends_a_byte_now_and_then_is_cut(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time; the request does not."""
    monkeypatch.setattr("podium.report.web.serve.REQUEST_S", 0.5)
    make_run(tmp_path / "run")
    with socket.create_connection(("127.0.0.1", serve(tmp_path)), timeout=60) as client:
        client.sendall(b"GET / HTTP/1.1\r\nX: ")
        for _ in range(600):
            try:
                client.sendall(b"y")
            except OSError:
                return  # cut
            time.sleep(0.05)
    pytest.fail("a request that never ended was not cut")


def test_a_client_that_does_not_read_is_cut(tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.report.web.serve.SEND_S", 0.3)
    make_run(tmp_path / "run", texts=["x" * 2_000_000] * 4)
    port = serve(tmp_path / "run")
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(f"GET /rollouts/1 HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        time.sleep(2)
        received = 0
        while data := client.recv(1 << 20):
            received += len(data)
    assert received < 8_000_000


def test_a_page_can_be_asked_for_by_head(tmp_path: Path, serve: Serve) -> None:
    make_run(tmp_path / "run")
    status, headers, body = ask(serve(tmp_path), "/", method="HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 1000
