"""`podium` as a command in a process of its own that need not import torch: it is forked from one that has.

All of it is as after `python -m podium.cli` but for what Python does before the first line of Podium, and for variables
that libraries read when they are imported. Tests of those start a real command.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
POLL_S = 0.005


class Process:
    """What subprocess.Popen tells of a process, of one that is another's child."""

    def __init__(self, server: "ForkServer", pid: int, status: Path) -> None:
        self.pid, self.returncode = pid, None
        self._server, self._status = server, status

    returncode: int | None

    def poll(self) -> int | None:
        if self.returncode is None:
            if self._status.exists():
                self.returncode = int(self._status.read_text())
                self._status.unlink()
            else:
                assert self._server.is_alive, "the fork server is gone"
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (3600 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)  # until its status is told, nobody else has its number

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The other end of tests/fork_server.py. `modules` are imported besides what every command needs."""

    def __init__(self, *modules: str) -> None:
        self._folder, self._numbers = tempfile.TemporaryDirectory(prefix="fork-", dir="/tmp"), count()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", *modules],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._read() == {"ready": True}

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start(
        self,
        *arguments: str,
        stdout: Path,
        stderr: Path,
        environment: dict[str, str] | None = None,
        folder: Path | None = None,
        **job: Any,
    ) -> Process:
        """`podium ARGUMENTS`, or what else a job says."""
        status = Path(self._folder.name) / str(next(self._numbers))
        variables = {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **(os.environ if environment is None else environment),
        }
        given = {"stdout": str(stdout), "stderr": str(stderr), "folder": str(folder or Path.cwd())}
        job = {"status": str(status), "environment": variables, **given, **job}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job if "call" in job else {"arguments": arguments, **job}) + "\n")
        self._process.stdin.flush()
        return Process(self, self._read()["pid"], status)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()
        self._folder.cleanup()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the fork server is gone"
        return json.loads(line)


VLLM = ("tests.engine.vllm_imported",)
"""Modules of a fork server whose processes have imported vLLM, which takes longer than most of what they do."""


@cache
def fork_server(*modules: str) -> ForkServer:
    """One for all tests of this process."""
    server = ForkServer(*modules)
    atexit.register(server.close)
    return server


def podium(*arguments: str, **others: Any) -> subprocess.CompletedProcess[str]:
    """As subprocess.run does with `capture_output`; `others` as of `finished`."""
    return finished(arguments, {}, **others)


def call(function: str, *given: Any, **others: Any) -> subprocess.CompletedProcess[str]:
    """What a function ("module:name") prints in a process of its own, and the status that it returns; `others` as of
    `finished`."""
    return finished((function,), {"call": function, "given": given}, **({"folder": ROOT} | others))


def finished(
    arguments: tuple[str, ...],
    job: dict[str, Any],
    *,
    timeout: float = 280,
    modules: tuple[str, ...] = (),
    **others: Any,
) -> subprocess.CompletedProcess[str]:
    """A process that has ended; `others` as of `ForkServer.start` and in `fork_server.py`."""
    with tempfile.TemporaryDirectory(prefix="podium-", dir="/tmp") as scratch:
        stdout, stderr = Path(scratch) / "stdout", Path(scratch) / "stderr"
        process = fork_server(*modules).start(*arguments, stdout=stdout, stderr=stderr, **job | others)
        try:
            process.wait(timeout)
        finally:
            process.kill()
        assert process.returncode is not None
        return subprocess.CompletedProcess(arguments, process.returncode, stdout.read_text(), stderr.read_text())
