"""Every route, every method and every spelling of a path is closed without the token, but /health."""

import asyncio
from itertools import product
from typing import Any

import pytest

from podium.server.app import make_app
from podium.server.door import Door, digest
from podium.server.served import Served

TOKEN = "a-token-that-only-the-test-knows"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "PROPFIND")
GOOD, BAD = ("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer wrong")
WITHOUT: dict[str, list[tuple[str, str]]] = {
    "none": [],
    "wrong": [BAD],
    "empty": [("authorization", "")],
    "empty bearer": [("authorization", "Bearer ")],
    "no scheme": [("authorization", TOKEN)],
    "basic": [("authorization", f"Basic {TOKEN}")],
    "longer": [("authorization", f"Bearer {TOKEN}x")],
    "shorter": [("authorization", f"Bearer {TOKEN[:-1]}")],
    "two spaces": [("authorization", f"Bearer  {TOKEN}")],
    "good twice": [GOOD, GOOD],
    "good and bad": [GOOD, BAD],
    "another header": [("x-api-key", TOKEN), ("cookie", f"token={TOKEN}")],
}


@pytest.fixture
def door(served: Served) -> Door:
    return make_app(served, digest(TOKEN), "inprocess", lambda _: None)


Asked = tuple[str, str, list[tuple[str, str]]]


def ask(door: Door, asked: list[Asked]) -> list[int]:
    """The statuses of (method, path, headers); a client library would tidy up the paths."""

    async def run() -> list[int]:
        return [await status_of(door, *each) for each in asked]

    return asyncio.run(run())


async def status_of(door: Door, method: str, target: str, headers: list[tuple[str, str]]) -> int:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}" if method == "POST" else b"", "more_body": False}

    path, _, query = target.partition("?")
    raw = [(name.encode(), value.encode()) for name, value in [*headers, ("content-type", "application/json")]]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode()}
    await door({**scope, "headers": raw, "http_version": "1.1", "root_path": ""}, receive, send)
    return sent[0]["status"]


def spelled(path: str) -> list[str]:
    return [path, f"{path}/", f"/{path}", f"/x/..{path}", f"{path}?token={TOKEN}", f"{path}?access_token={TOKEN}"]


def paths(door: Door) -> list[str]:
    return [route.path for route in door.app.routes]  # type: ignore[attr-defined]


def test_every_route_but_health_wants_the_token(door: Door) -> None:
    known = paths(door)
    assert {"/generate", "/reload_weights", "/metrics", "/info"} <= set(known)
    unknown = ["/", "/docs", "/openapi.json", "/v1/completions", "/health2"]
    asked = [
        (method, spelling, headers)
        for path, method, headers in product([*known, *unknown], METHODS, WITHOUT.values())
        for spelling in spelled(path)
        if not (spelling.partition("?")[0] == "/health" and method in ("GET", "HEAD"))
    ]
    answers = ask(door, asked)
    assert len(asked) > 5000
    assert set(answers) == {401}


def test_the_token_opens_every_route(door: Door) -> None:
    """So that the 401s above are the token's doing."""
    read = ("/health", "/info", "/metrics", "/v1/models")
    answers = ask(door, [("GET" if path.startswith(read) else "POST", path, [GOOD]) for path in paths(door)])
    assert set(answers) == {200, 400, 404, 422}  # under /v1 a bad body is 400, and another model's name 404
    assert ask(door, [("GET", "/nothing", [GOOD]), ("PUT", "/info", [GOOD])]) == [404, 405]


def test_what_can_be_read_can_be_asked_for_by_head(door: Door) -> None:
    assert ask(door, [("HEAD", "/health", [])]) == [200]
    assert ask(door, [("HEAD", path, [GOOD]) for path in ("/info", "/metrics", "/v1/models")]) == [200] * 3


def test_health_is_open(door: Door) -> None:
    assert ask(door, [("GET", "/health", []), ("GET", "/health", [BAD]), ("GET", "/health?x=1", [])]) == [200] * 3


def test_a_route_that_is_added_later_is_closed_too(door: Door) -> None:
    door.app.get("/new")(lambda: {"secret": 1})
    assert ask(door, [("GET", "/new", []), ("GET", "/new", [GOOD])]) == [401, 200]


def test_a_websocket_is_never_accepted(door: Door) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    asyncio.run(door({"type": "websocket", "path": "/generate", "headers": []}, receive, send))
    assert [message["type"] for message in sent] == ["websocket.close"]
