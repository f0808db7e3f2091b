"""A model hub in miniature, for uploads: makes repositories, takes large files by LFS and small ones in the commit."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """What arrived."""

    url: str
    token: str
    repositories: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    """Of the last commit, by path."""
    message: str = ""
    _large: dict[str, bytes] = field(default_factory=dict)

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            is_good = json.loads(body)["content"].startswith("---\n")
            return (200 if is_good else 400), {"errors": [], "warnings": []}
        if "/preupload/" in path:
            asked = json.loads(body)["files"]
            modes = {file["path"]: "lfs" if file["path"].endswith(".safetensors") else "regular" for file in asked}
            return 200, {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]}
        if path.endswith(".git/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            action = {oid: {"upload": {"href": f"{self.url}/large/{oid}"}} for oid in (each["oid"] for each in wanted)}
            return 200, {"transfer": "basic", "objects": [{**each, "actions": action[each["oid"]]} for each in wanted]}
        if "/commit/" in path:
            name = path.removeprefix("/api/models/").partition("/commit/")[0]
            return self._commit(name, [json.loads(line) for line in body.splitlines()])
        return 404, {"error": f"no {path}"}

    def keep(self, oid: str, body: bytes) -> int:
        self._large[oid] = body
        return 200 if hashlib.sha256(body).hexdigest() == oid else 400

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
        if name.startswith("other/"):
            return 403, {"error": "You don't have the rights to create a model under this namespace"}
        self.repositories[name] = asked
        return 200, {"url": f"{self.url}/{name}", "name": name}

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> tuple[int, Any]:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.message = value["summary"]
            elif line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self._large[value["oid"]]
        return 200, {"commitUrl": f"{self.url}/{name}/commit/1", "commitOid": "1" * 40, "success": True}


@contextmanager
def hub_stand_in(token: str = "hf_stand_in") -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        def _send(self, status: int, data: Any) -> None:
            body = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("content-length", 0)))

        def do_POST(self) -> None:
            body = self._body()
            if self.headers.get("authorization") != f"Bearer {hub.token}":
                self._send(401, {"error": "Invalid username or password."})
            else:
                self._send(*hub.answer(self.path.partition("?")[0], body))

        def do_PUT(self) -> None:
            self._send(hub.keep(self.path.removeprefix("/large/"), self._body()), {})

        def do_GET(self) -> None:
            self._send(404, {"error": f"no {self.path}"})

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}", token)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
