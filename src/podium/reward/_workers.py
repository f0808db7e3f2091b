"""The driver's side of reward workers: who runs what, for how long, and what happens when one breaks.

A task is one reward on one group. Its time is taken here, outside the process that it runs in, and a worker that is
late is killed with its whole process group: no thread, alarm or coroutine can stop a regular expression, a big integer
or a C library. The rollout at fault abstains, the others are scored by a fresh worker. A worker that died is given
the same call once more, since the cause may have been outside (memory taken by others), and then no more.

Lives in one event loop; `close` may be called after it.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from podium.errors import RewardFailedError
from podium.reward._calls import late
from podium.reward._contract import Style
from podium.reward._messages import MAX_LINE, EncodedGroup, Failed, Outcome, Task, decode_outcome, encode_task
from podium.reward._template import START_S, Template

Fate = Literal["done", "late", "dead"]
GRACE_S = 0.25
MAX_STARTS = 5
"""Times in a row that starting a worker may fail."""


class RewardWorkers:
    """`recipes`: name and plain options of every reward that may be asked for; `size`: processes at most."""

    def __init__(self, recipes: Sequence[Mapping[str, Any]], size: int, memory_mb: int) -> None:
        self._template = Template(recipes, memory_mb)
        self._slots = asyncio.Semaphore(size)
        self._idle: list[Worker] = []

    async def score(self, reward: str, style: Style, limit_s: float, group: EncodedGroup) -> list[Outcome]:
        """One outcome a rollout; a breach of contract is raised."""
        outcomes: dict[int, Outcome] = {}
        suspects: set[int] = set()
        while left := [index for index in range(group.num_rollouts) if index not in outcomes]:
            if style == "together" and suspects:
                left = left[:1]  # which of those that ran beside each other broke the worker is not known
            task = Task(reward, tuple(left), limit_s, group.ordinal)
            done, failed = await self._run(task, encode_task(task, group), style)
            outcomes |= done
            blamed = [index for index in left if index not in done]
            blamed = blamed[:1] if style == "each" else blamed
            is_sure = failed == late(limit_s) and (style != "together" or len(left) == 1)
            if failed and (is_sure or suspects.issuperset(blamed)):
                outcomes |= dict.fromkeys(blamed, failed)
            suspects.update(blamed)
        return [outcomes[index] for index in range(group.num_rollouts)]

    async def _run(self, task: Task, frame: bytes, style: Style) -> tuple[dict[int, Outcome], Failed | None]:
        """The outcomes, and why there are no more."""
        async with self._slots:
            worker = self._idle.pop() if self._idle else await self._started()
            done: dict[int, Outcome] = {}
            fate: Fate | None = None
            try:
                fate = await worker.work(task, frame, style, done)
            finally:  # also where the run is being cancelled, or the contract was broken
                if fate == "done":
                    self._idle.append(worker)
                else:
                    worker.kill()
            if fate == "done":
                return done, None
            status = await self._template.bury(worker.pid)
            return done, late(task.limit_s) if fate == "late" else Failed(_described(status))

    async def _started(self) -> "Worker":
        for attempt in range(MAX_STARTS):
            await asyncio.sleep(0.1 * attempt)
            worker = Worker(await self._template.fork())
            try:
                await worker.greet(asyncio.get_running_loop().time() + START_S)
                return worker
            except (OSError, ValueError):
                worker.close()
            except BaseException:  # the run is being cancelled
                worker.close()
                raise
        raise RewardFailedError(f"reward workers cannot be started: {MAX_STARTS} attempts failed, see stderr")

    def close(self) -> None:
        """Ends every process; the workers start anew if they are needed again."""
        for worker in self._idle:
            worker.close()
        self._idle.clear()
        self._template.close()


class Worker:
    """A process at the other end of a socket. What it sends is not trusted."""

    def __init__(self, end: socket.socket) -> None:
        self.socket, self.pid = end, 0
        self._life: int | None = None
        self._received = b""

    async def greet(self, deadline: float) -> None:
        """Its process number, sent before any reward ran in it."""
        self.pid = int(await self.line(deadline))
        self._life = os.pidfd_open(self.pid)

    async def work(self, task: Task, frame: bytes, style: Style, done: dict[int, Outcome]) -> Fate:
        """Fills `done` as outcomes arrive. Each call has its limit; coroutines, which the worker ends itself, a little
        more: if they do not end, one of them holds up all."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + task.limit_s + (GRACE_S if style == "together" else 0.0)
        try:
            async with asyncio.timeout(task.limit_s):
                await asyncio.get_running_loop().sock_sendall(self.socket, frame)
            while len(done) < len(task.indices):
                line = await self.line(deadline)
                index, outcome = decode_outcome(line, set(task.indices).difference(done))
                done[index] = outcome
                deadline = clock() + task.limit_s if style == "each" else deadline
        except TimeoutError:
            return "late"
        except (OSError, ValueError, RecursionError):  # its end is closed, or nothing of ours wrote that
            return "dead"
        return "dead" if self._received else "done"

    async def line(self, deadline: float) -> bytes:
        """The next line; `TimeoutError` if it is not there in time, `OSError` if it never will be."""
        while b"\n" not in self._received:
            if len(self._received) > MAX_LINE:
                raise ValueError("a line that does not end")
            if not self._receive():
                has_ended = await self._until_readable(deadline)
                if not self._receive():
                    raise ConnectionError if has_ended else TimeoutError
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _receive(self) -> bool:
        """Whether something was there."""
        try:
            chunk = self.socket.recv(MAX_LINE)
        except BlockingIOError:
            return False
        if not chunk:
            raise ConnectionError
        self._received += chunk
        return True

    async def _until_readable(self, deadline: float) -> bool:
        """Returns at the deadline at the latest; True if the process has ended, though a child of its may still hold
        the socket. Takes nothing from the socket: an event loop that was held up sees the deadline passed and the
        answer there at the same moment, and then the answer counts."""
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[bool] = loop.create_future()

        def wake(has_ended: bool) -> None:
            if not woken.done():
                woken.set_result(has_ended)

        loop.add_reader(self.socket, wake, False)
        if self._life is not None:
            loop.add_reader(self._life, wake, True)
        timer = loop.call_at(deadline, wake, False)
        try:
            return await woken
        finally:
            timer.cancel()
            loop.remove_reader(self.socket)
            if self._life is not None:
                loop.remove_reader(self._life)

    def kill(self) -> None:
        """The whole group. The template keeps the number from being given away until the worker is buried."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """A healthy worker ends when it sees its socket closed."""
        self.socket.close()
        if self._life is not None:
            os.close(self._life)


def _described(status: int | None) -> str:
    """How a process ended, in words."""
    if status is None:
        return "its process died"
    if status >= 0:
        return f"its process exited with code {status}"
    if status == -signal.SIGXCPU:
        return "its processor time was used up"
    return f"its process was killed by {signal.Signals(-status).name}"
