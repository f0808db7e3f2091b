"""Requests that mean harm, to a real server: each is refused, the memory stays, the next client is served at once."""

import json
import os
import pickle
import socket
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from podium.records import Request, Sampling
from podium.remote.codec import to_plain
from podium.server import door
from tests.server.serving import Running

MAX_GROWTH = 64 << 20
REFUSED = {400, 401, 403, 404, 405, 408, 413, 415, 422, 431}


class Canary:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def connect(server: Running) -> socket.socket:
    parts = urlsplit(server.url)
    made = socket.create_connection((parts.hostname, parts.port), timeout=30)
    made.settimeout(30)
    return made


def raw(server: Running, *pieces: bytes) -> int:
    """The status of an answer to these bytes; 0 where the connection was cut without one."""
    with connect(server) as client:
        try:
            for piece in pieces:
                client.sendall(piece)
        except OSError:
            pass  # cut while sending; the answer may be there all the same
        try:
            return int(client.recv(4096).split(b" ")[1])
        except (OSError, IndexError):
            return 0


def head(server: Running, line: str = "POST /generate HTTP/1.1", token: bool = True, **headers: str) -> bytes:
    fields = {"host": "x", "content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    if token:
        fields["authorization"] = f"Bearer {server.token}"
    return "\r\n".join([line, *(f"{k}: {v}" for k, v in fields.items()), "", ""]).encode()


def body(server: Running, content: bytes, **headers: str) -> int:
    return raw(server, head(server, content_length=str(len(content)), **headers), content)


def generate(server: Running, **fields: object) -> int:
    return body(server, json.dumps({"prompt_token_ids": [5, 6], "max_tokens": 4} | fields).encode())


def rollouts(
    server: Running,
    prompts: object = ([5, 6],),
    place: int = 0,
    sampling: dict[str, object] | None = None,
    **fields: object,
) -> int:
    """The body of Podium's own client, with something wrong in it."""
    one = to_plain(Request((), Sampling(4), 1)) | fields
    one["sampling"] |= sampling or {}
    content = json.dumps({"prompts": prompts, "requests": [[place, one]], "run": None}).encode()
    return raw(server, head(server, "POST /rollouts HTTP/1.1", content_length=str(len(content))), content)


def endless(server: Running, token: bool) -> int:
    chunk = b"%x\r\n" % 65536 + b"1" * 65536 + b"\r\n"
    return raw(server, head(server, token=token, transfer_encoding="chunked"), *[chunk] * 400)


def attacks(server: Running, canary: bytes) -> dict[str, Callable[[], int]]:
    big = b"[" + b"1," * (300 << 19) + b"1]"
    deep = {"[": b"[" * 100_000, "{": b'{"requests":' * 100_000}
    ids = {"prompt_token_ids": [5, 6]}
    return {
        "300 MB body": lambda: body(server, big),
        "300 MB body without token": lambda: raw(server, head(server, token=False, content_length=str(len(big))), big),
        "300 MB announced": lambda: raw(server, head(server, content_length=str(300 << 20))),
        "length of 5000 digits": lambda: raw(server, head(server, content_length="9" * 5000)),
        "negative length": lambda: raw(server, head(server, content_length="-1")),
        "two lengths": lambda: raw(
            server, head(server, content_length="2").replace(b"\r\n\r\n", b"\r\ncontent-length: 3\r\n\r\n"), b"{}"
        ),
        "endless chunks": lambda: endless(server, True),
        "endless chunks without token": lambda: endless(server, False),
        "chunk of no size": lambda: raw(server, head(server, transfer_encoding="chunked"), b"zz\r\n" * 9),
        "chunk of a huge size": lambda: raw(server, head(server, transfer_encoding="chunked"), b"f" * 40 + b"\r\n"),
        "body of a GET": lambda: raw(server, head(server, "GET /health HTTP/1.1", content_length="5"), b"12345"),
        "30 KB header": lambda: body(server, b'{"prompt_token_ids":[5],"max_tokens":4}', x="y" * 30_000),
        "30 KB in 300 headers": lambda: body(
            server, b'{"prompt_token_ids":[5],"max_tokens":4}', **{f"x{k}": "y" * 90 for k in range(300)}
        ),
        "30 KB query": lambda: raw(server, head(server, f"GET /info?{'a' * 30_000} HTTP/1.1")),
        "200 KB header": lambda: raw(server, head(server, x="y" * 200_000, content_length="2"), b"{}"),
        "10,000 headers": lambda: raw(server, head(server, **{f"x{k}": "y" for k in range(10_000)})),
        "200 KB path": lambda: raw(server, head(server, f"POST /{'a' * 200_000} HTTP/1.1")),
        "no HTTP": lambda: raw(server, b"\x16\x03\x01\x02\x00" + bytes(range(256)) * 100),
        "NUL in the path": lambda: raw(server, b"GET /\0 HTTP/1.1\r\nhost: x\r\n\r\n"),
        "deep lists": lambda: body(server, deep["["]),
        "deep objects": lambda: body(server, deep["{"]),
        "many small lists": lambda: body(server, b"[" + b"[]," * 2_000_000 + b"[]]"),
        "many small objects": lambda: body(server, b"[" + b"{}," * 2_000_000 + b"{}]"),
        "many numbers": lambda: body(server, b'{"prompt_token_ids":[' + b"999," * 2_000_000 + b"1]}"),
        "many texts": lambda: body(server, b"[" + b'"ab",' * 1_500_000 + b'"ab"]'),
        "integer of 5000 digits": lambda: body(server, b'{"max_tokens":' + b"9" * 5000 + b"}"),
        "n of 10^12": lambda: generate(server, n=10**12),
        "n of 0": lambda: generate(server, n=0),
        "a million seeds": lambda: generate(server, seeds=[1] * 500_000),
        "max_tokens of -1": lambda: generate(server, max_tokens=-1),
        "max_tokens of 10^9": lambda: generate(server, max_tokens=10**9),
        "temperature NaN": lambda: body(server, b'{"prompt_token_ids":[5],"temperature":NaN}'),
        "temperature infinite": lambda: body(server, b'{"prompt_token_ids":[5],"temperature":1e999}'),
        "top_p of 2": lambda: generate(server, top_p=2),
        "top_k of -5": lambda: generate(server, top_k=-5),
        "ids out of range": lambda: generate(server, prompt_token_ids=[10**6]),
        "ids below 0": lambda: generate(server, prompt_token_ids=[-1]),
        "no prompt": lambda: generate(server, prompt_token_ids=[]),
        "prompt beyond the context": lambda: generate(server, prompt_token_ids=[5] * 100_000),
        "ids as text": lambda: generate(server, prompt_token_ids=["5"]),
        "bool as n": lambda: generate(server, n=True),
        "unknown field": lambda: generate(server, trust_remote_code=True),
        "two forms at once": lambda: generate(server, messages=[{"role": "user", "content": "x"}]),
        "same key twice": lambda: generate(
            server, prompt_token_ids=None, requests=[ids | {"key": 1, "seeds": [1]}] * 2
        ),
        "100,000 prompts": lambda: generate(server, prompt_token_ids=None, requests=[{}] * 15_000),
        "no rollouts": lambda: rollouts(server, prompts="all"),
        "a rollout of no prompt": lambda: rollouts(server, place=1),
        "ids outside in a rollout": lambda: rollouts(server, prompts=[[10**6]]),
        "no ids in a rollout": lambda: rollouts(server, prompts=[[]]),
        "seed of 65 bits": lambda: rollouts(server, seed=1 << 64),
        "top_p of 0 in a rollout": lambda: rollouts(server, sampling={"top_p": 0.0}),
        "top_k of 0 in a rollout": lambda: rollouts(server, sampling={"top_k": 0}),
        "no tokens in a rollout": lambda: rollouts(server, sampling={"max_new_tokens": 0}),
        "temperature of -1 in a rollout": lambda: rollouts(server, sampling={"temperature": -1.0}),
        "temperature NaN in a rollout": lambda: rollouts(server, sampling={"temperature": float("nan")}),
        "stop id outside in a rollout": lambda: rollouts(server, sampling={"stop_ids": [-5]}),
        "unknown field in a rollout": lambda: rollouts(server, engine="mine"),
        "10^6 long stop": lambda: generate(server, stop=["x" * 10**6]),
        "pickle as the body": lambda: body(server, canary, content_type="application/octet-stream"),
        "pickle called JSON": lambda: body(server, canary),
        "multipart": lambda: body(server, canary, content_type="multipart/form-data; boundary=x"),
        "compressed": lambda: body(server, canary, content_encoding="gzip"),
        "UTF-16": lambda: body(server, '{"n":1}'.encode("utf-16")),
        "half a body": lambda: raw(server, head(server, content_length="100"), b"{"),
        "list instead of an object": lambda: body(server, b"[1]"),
        "nothing": lambda: body(server, b""),
    }


def is_healthy(server: Running) -> bool:
    """Within a second."""
    try:
        return httpx.get(f"{server.url}/health", timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


def test_no_abuse_costs_memory_or_service(server: Running, tmp_path: Path) -> None:
    canary = pickle.dumps(Canary(tmp_path / "opened"))
    for _ in range(3):
        assert generate(server) == 200  # warm, so that growth is the abuse's
    slow = [connect(server) for _ in range(20)]
    for number, client in enumerate(slow):
        client.sendall(head(server, content_length="50", token=number % 2 == 0)[: None if number < 10 else 40])
    began = time.monotonic()
    before, highest = server.rss(), 0
    every = attacks(server, canary)
    assert len(every) >= 30
    odd = {}
    for name, attack in every.items():
        status = attack()
        highest = max(highest, server.rss())
        if status not in REFUSED and not (status == 0 and ("body" in name or "chunk" in name or "header" in name)):
            odd[name] = status
        assert any(is_healthy(server) for _ in range(3)), name  # on a busy machine the first try may be late
    assert odd == {}
    assert highest - before < MAX_GROWTH
    assert not (tmp_path / "opened").exists()
    assert generate(server) == 200
    for client in slow:  # neither an unfinished header nor an unfinished body holds a connection for long
        client.settimeout(max(0.1, began + door.BODY_S + 15 - time.monotonic()))
        try:
            while client.recv(4096):
                pass
        except ConnectionError:
            pass
        client.close()


EXTREMES: dict[str, list[object]] = {
    "top_p": [1.0, 1e-6, 1e-46, 1e-300, 5e-324],
    "top_k": [1, (1 << 31) - 1],
    "temperature": [0, 1e-3, 100.0],
    "stop": [[], ["\0"], ["x" * 256] * 16],
    "stop_token_ids": [[], [0], [5] * 1000],
    "seeds": [[-(1 << 63)], [(1 << 63) - 1]],
    "max_tokens": [1],
}


@pytest.mark.parametrize("name", EXTREMES)
def test_what_is_within_bounds_is_answered(name: str, server: Running) -> None:
    """And what is out of them is refused, never passed on to fail in the engine."""
    assert {str(value): generate(server, **{name: value}) for value in EXTREMES[name]} == {
        str(value): 200 for value in EXTREMES[name]
    }


def test_values_that_would_fail_in_the_engine_are_refused(server: Running) -> None:
    bad: list[dict[str, object]] = [
        {"temperature": 1e-300},
        {"temperature": 5e-324},
        {"temperature": 1e300},
        {"top_p": 0},
        {"top_p": -5e-324},
        {"top_k": 0},
        {"top_k": 1 << 31},
        {"stop": [""]},
        {"min_p": 0.1},
        {"seeds": [1 << 63]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [1 << 30]},
        {"max_tokens": 0},
    ]
    assert [(fields, status) for fields in bad if (status := generate(server, **fields)) != 422] == []


def test_no_secret_and_no_path_is_told(server: Running) -> None:
    with server.client() as client:
        told = [client.post("/reload_weights", json={"id": "nothing", "version": 1}).text]
        told.append(client.post("/generate", json={"prompt_token_ids": "x", "token": server.token}).text)
        told.append(client.post("/generate?token=" + server.token, content=b"{").text)
    told.append(httpx.get(f"{server.url}/generate?token={server.token}").text)
    everything = "\n".join([*told, server.log.partition("\n")[2]])  # the first line says where the weights are
    assert server.token not in server.log
    assert server.token not in everything
    assert str(server.root) not in everything
    assert "Traceback" not in everything
    assert "site-packages" not in everything
