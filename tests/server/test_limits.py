"""What a body may be, before it is parsed."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from podium.server import door
from podium.server.door import Refusal, check_head, check_json


def status_of(check: Callable[..., None], *given: Any) -> int:
    try:
        check(*given)
    except Refusal as refusal:
        return refusal.status
    return 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"a":[1,-2.5e3,"x"]}', 200),
        (b"[" * 8 + b"]" * 8, 200),
        (b"[" * 9 + b"]" * 9, 400),
        (b"[" * 100_000, 400),
        (b'{"a":' * 10_000, 400),
        (b'["[[[[[[[[[[[["]', 200),
        (rb'["\"[[[[[[[[[[[["]', 200),
        (b"1" * 20, 200),
        (b"1" * 21, 400),
        (b"1" * 5000, 400),
        (b'["' + b"1" * 5000 + b'"]', 200),
        (b"[" + b"[]," * 30_000 + b"1]", 413),
        (b"[" + b"1," * 700_000 + b"1]", 413),
        (b"[" + b'"",' * 30_000 + b"1]", 413),
        (b'"\xff"', 400),
        ('{"a": 1}'.encode("utf-16"), 400),
        (b'"a\0b"', 400),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_body_is_bounded_before_it_is_parsed(body: bytes, status: int) -> None:
    assert status_of(check_json, body) == status


@pytest.mark.parametrize("piece", [b'"', b'\\"', b'"\\', b"\\", b'"a', b"[]"], ids=repr)
def test_the_look_at_a_full_body_takes_no_time_to_speak_of(piece: bytes) -> None:
    """Quotes without an end would make a careless pattern look at the rest of the body for each of them."""
    body = piece * (door.MAX_BODY_BYTES // len(piece))
    started = time.process_time()
    status_of(check_json, b'"' + body)
    status_of(check_json, body)
    assert time.process_time() - started < 30


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("POST", {b"content-type": b"application/json"}, 200),
        ("POST", {b"content-type": b"application/json; charset=UTF-8"}, 200),
        ("POST", {b"content-type": b"application/json; charset=utf-16"}, 415),
        ("POST", {}, 415),
        ("POST", {b"content-type": b"multipart/form-data; boundary=x"}, 415),
        ("POST", {b"content-type": b"application/x-python-pickle"}, 415),
        ("POST", {b"content-type": b"application/json", b"content-encoding": b"gzip"}, 415),
        ("POST", {b"content-type": b"application/json", b"content-length": b"9000000"}, 413),
        ("POST", {b"content-type": b"application/json", b"content-length": b"9" * 5000}, 413),
        ("GET", {}, 200),
        ("GET", {b"content-length": b"5"}, 400),
        ("GET", {b"transfer-encoding": b"chunked"}, 400),
    ],
)
def test_a_head_is_judged_before_the_body_is_read(method: str, headers: dict[bytes, bytes], status: int) -> None:
    assert status_of(check_head, method, headers) == status
