"""What torchrun does for `runtime.ranks`, by forks of the job itself: they need not import torch and DeepSpeed again.

A job of the fork server that names `tests.runtime.forked_ranks:instead_of_torchrun` under "prepare" has it. Each rank
runs the very module that torchrun would start. Ranks write their process ids into the folder FORKED_RANKS.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.distributed import TCPStore

from podium.runtime.ranks import launch

POLL_S = 0.01
AGENT = {
    "MASTER_ADDR": "127.0.0.1",
    "TORCHELASTIC_RUN_ID": "forked",
    "TORCHELASTIC_USE_AGENT_STORE": "True",  # the ranks meet at a port that the launcher has opened
    "TORCHELASTIC_RESTART_COUNT": "0",
}
PATIENCE_S = 30.0
"""As torchrun has it: then ranks that do not end are killed."""


def instead_of_torchrun() -> None:
    launch.subprocess = SimpleNamespace(Popen=ForkedRanks)  # type: ignore[assignment]


class ForkedRanks:
    """What the launcher needs of a torchrun process. If a rank fails, the others are told to end."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        [given] = [part for part in command if part.startswith("--nproc-per-node=")]
        ranks, self.returncode = int(given.partition("=")[2]), 0
        shared = {**AGENT, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        self._living: list[int] = []
        waiting: list[int] = []
        for rank in range(ranks):
            port, told = os.pipe()
            if (pid := os.fork()) == 0:
                run_rank(Path(command[-1]), env | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, port)
            self._living.append(pid)
            waiting.append(told)
        # After the forks, because it has a thread
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for told in waiting:
            os.write(told, str(self._store.port).encode())

    def send_signal(self, number: int) -> None:
        for pid in self._living:
            os.kill(pid, number)

    def wait(self) -> int:
        deadline = float("inf")
        while self._living:
            for pid in [*self._living]:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self._living.remove(pid)
                    self.returncode = self.returncode or abs(os.waitstatus_to_exitcode(status))
                    if self.returncode and deadline == float("inf"):
                        self.send_signal(signal.SIGTERM)
                        deadline = time.monotonic() + PATIENCE_S
            if time.monotonic() > deadline:
                self.send_signal(signal.SIGKILL)
            time.sleep(POLL_S)
        return self.returncode


def run_rank(job: Path, environment: dict[str, str], port: int) -> Any:
    """In the fork; never returns. `port` is the end of a pipe."""
    code = 70
    try:
        os.environ.update(environment | {"MASTER_PORT": os.read(port, 10).decode()})
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        (Path(environment["FORKED_RANKS"]) / environment["RANK"]).write_text(str(os.getpid()))
        launch.end_process(launch.run_rank(job))
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def living_ranks(folder: Path) -> dict[int, int]:
    """Rank → process id of the ranks that wrote them there and are still alive."""
    pids = {int(file.name): int(file.read_text()) for file in folder.iterdir()}
    assert pids, "no rank was started"
    return {rank: pid for rank, pid in pids.items() if Path(f"/proc/{pid}").exists()}
