"""One worker, as the driver sees it: a socket, a process number, and what it is doing right now."""

import asyncio
import os
import select
import signal
import socket
from contextlib import suppress
from typing import Literal

from podium.errors import RewardContractError
from podium.reward._contract import Style
from podium.reward._messages import MAX_LINE, Outcome, Task, decode_outcome

Fate = Literal["done", "late", "dead", "garbled"]
GRACE_S = 0.25
"""What a worker gets beyond the limit to end a slow coroutine itself."""


class Worker:
    """A process at the other end of a socket. What it sends is not trusted."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self.pid = 0
        self._life: int | None = None

    async def greet(self, limit_s: float) -> None:
        """Takes its process number, sent before any reward ran in it; `OSError` or `ValueError` if it never comes."""
        async with asyncio.timeout(limit_s):
            self.pid = int(await asyncio.get_running_loop().sock_recv(self._socket, 64))
        self._life = os.pidfd_open(self.pid)

    async def work(self, task: Task, frame: bytes, style: Style, done: dict[int, Outcome]) -> Fate:
        """Fills `done` as outcomes arrive; a breach of contract is raised."""
        assert self._life is not None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(task.limit_s):
                await loop.sock_sendall(self._socket, frame)
        except TimeoutError:
            return "late"
        except OSError:
            return "dead"
        conversation = Conversation(self._socket, task, style, done)
        loop.add_reader(self._socket, conversation.read)
        loop.add_reader(self._life, conversation.end)
        try:
            return await conversation.fate
        finally:
            loop.remove_reader(self._socket)
            loop.remove_reader(self._life)
            conversation.timer.cancel()

    @property
    def is_alive(self) -> bool:
        """A process's descriptor can be read once the process has ended."""
        return self._life is not None and not select.select([self._life], [], [], 0)[0]

    def kill(self) -> None:
        """The whole group. The template keeps the number from being given away until the worker is buried."""
        assert self.pid > 1  # 0 would be the driver's own group
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """A healthy worker ends when it sees its socket closed."""
        self._socket.close()
        if self._life is not None:
            os.close(self._life)


class Conversation:
    """Waits for the outcomes of one task. Each call has its limit, counted from the outcome before; calls that run
    together or as one have theirs from the start."""

    def __init__(self, end: socket.socket, task: Task, style: Style, done: dict[int, Outcome]) -> None:
        self._socket, self._task, self._style, self._done = end, task, style, done
        self._missing = set(task.indices)
        self._received = b""
        self._loop = asyncio.get_running_loop()
        self.fate: asyncio.Future[Fate] = self._loop.create_future()
        self._deadline = self._loop.time() + task.limit_s + (GRACE_S if style == "together" else 0.0)
        self.timer = self._loop.call_at(self._deadline, self._look_at_the_clock)

    def read(self) -> None:
        """Takes some of what is there."""
        if self.fate.done():
            return
        try:
            chunk = self._socket.recv(MAX_LINE)
            if not chunk:
                raise ConnectionError
            self._take(chunk)
        except BlockingIOError:
            return
        except RewardContractError as breach:
            self.fate.set_exception(breach)
        except OSError:
            self.fate.set_result("dead")
        except (ValueError, RecursionError):  # nothing of ours wrote that
            self.fate.set_result("garbled")

    def end(self) -> None:
        """The process has ended, though a child of its may still hold the socket; what it said before counts."""
        missing = None
        while missing != len(self._missing) and not self.fate.done():
            missing = len(self._missing)
            self.read()
        if not self.fate.done():
            self.fate.set_result("dead")

    def _take(self, chunk: bytes) -> None:
        *lines, self._received = (self._received + chunk).split(b"\n")
        for line in lines:
            index, outcome = decode_outcome(line, self._missing)
            self._missing.discard(index)
            self._done[index] = outcome
        if len(self._received) > MAX_LINE:
            raise ValueError("a line that does not end")
        if not self._missing:
            self.fate.set_result("garbled" if self._received else "done")
        elif lines and self._style == "each":
            self._deadline = self._loop.time() + self._task.limit_s

    def _look_at_the_clock(self) -> None:
        """After a hold-up the event loop reads what is there before it comes here, so an answer in time counts."""
        if self.fate.done():
            return
        if self._loop.time() < self._deadline:
            self.timer = self._loop.call_at(self._deadline, self._look_at_the_clock)
        else:
            self.fate.set_result("late")
