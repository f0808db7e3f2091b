"""`podium serve` as a child, for benchmarks whose engine is a process of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_S = 120


@dataclass(frozen=True)
class Server:
    url: str
    pid: int


@contextmanager
def a_server(
    folder: Path, environment: Mapping[str, str], *, model: str = "embedded", core: int | None = None
) -> Iterator[Server]:
    """On the CPU, over a socket in this folder; with a core of its own where one is given."""
    socket = folder / "engine.sock"
    command = [sys.executable, "-m", "podium.cli", "serve", model, f"--uds={socket}", "--model.device=cpu"]
    process = subprocess.Popen(
        command,
        env={**environment, "TMPDIR": str(folder)},  # nothing is left behind when it is killed
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
        start_new_session=True,  # else Linux gives both sides together the weight of one, on a machine with other work
    )
    try:
        deadline = time.monotonic() + START_S
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit("the server did not start")
            time.sleep(0.1)
        yield Server(f"unix:{socket}", process.pid)
    finally:
        process.kill()  # which ends also one that stands still
        process.wait()
