"""A real `podium serve` in a process of its own, for the tests that need one."""

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.commands import Process, fork_server

STARTS_WITHIN_S = 120


@dataclass
class Running:
    """A server that answers."""

    process: Process
    url: str
    """As an engine's option."""
    token_file: Path | None
    root: Path
    log_file: Path

    @property
    def token(self) -> str:
        assert self.token_file is not None
        return self.token_file.read_text().strip()

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def engine_options(self) -> dict[str, Any]:
        return {"url": self.url} | ({"token_file": str(self.token_file)} if self.token_file else {})

    def client(self, **others: Any) -> httpx.Client:
        is_unix = self.url.startswith("unix:")
        transport = httpx.HTTPTransport(uds=self.url.removeprefix("unix:")) if is_unix else None
        headers = {"authorization": f"Bearer {self.token}"} if self.token_file else {}
        base = "http://engine" if is_unix else self.url
        return httpx.Client(**({"transport": transport, "base_url": base, "headers": headers, "timeout": 60} | others))

    def rss(self) -> int:
        """Bytes of memory that the process holds."""
        fields = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line.split()[1] for line in fields if line.startswith("VmRSS"))) << 10


@contextmanager
def serving(
    folder: Path, *arguments: str, model: str = "embedded", tcp: bool = False, modules: tuple[str, ...] = ()
) -> Iterator[Running]:
    """By a unix socket without a token, or by a port with one; in a process that has imported the `modules`."""
    folder.mkdir(parents=True, exist_ok=True)
    token_file, socket = folder / "token", folder / "socket"
    place = ["--port", "0", "--token-file", str(token_file)] if tcp else ["--uds", str(socket)]
    log_file = folder / "log"
    log_file.write_bytes(b"")
    command = ("serve", model, *place, "--root", str(folder / "root"), *arguments)
    process = fork_server(*modules).start(*command, stdout=log_file, stderr=log_file)
    try:
        address = _address(process, log_file)
        yield Running(process, address, token_file if tcp else None, folder / "root", log_file)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


def _address(process: Process, log_file: Path) -> str:
    deadline = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < deadline:
        for line in log_file.read_text().splitlines():
            if " at " in line and "weights by id" in line:
                url = line.split(" at ")[1].split(",")[0]
                return url
        assert process.poll() is None, log_file.read_text()
        time.sleep(0.1)
    raise AssertionError(f"no server after {STARTS_WITHIN_S} s: {log_file.read_text()}")
