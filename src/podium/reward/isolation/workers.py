"""The driver's side of reward workers: which worker runs what, for how long, and what happens when one breaks.

A task is one reward on one group. Its time is measured here, outside the process that runs it, and a late worker is
killed with its whole process group: no thread, alarm or coroutine can stop a regular expression, a big integer or a C
library. The rollout at fault abstains; a fresh worker scores the others. A call whose worker died is repeated once,
because the cause may have been outside (memory taken by other programs).

Workers are forked by a fresh interpreter, without torch, that has imported the rewards (remote/fork_server.py).
`RewardWorkers` belongs to one event loop; `close` may be called after the loop has ended.
"""

import asyncio
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from podium.errors import RewardFailedError
from podium.remote.codec import encode
from podium.remote.fork_server import (
    CallError,
    Child,
    DiedError,
    ForkServer,
    GarbledError,
    Relay,
    RemoteError,
    StartError,
    how_it_ended,
)
from podium.remote.fork_server_process import Limits
from podium.reward.isolation.worker import MAX_REPLY, OUT_OF_MEMORY, EncodedGroup, Task, decode_outcome
from podium.reward.scoring.contract import Failed, Outcome, Style, late
from podium.terminal import warn

START_S = 120.0
"""Limit for importing the rewards, and for a worker to report that it runs."""
GRACE_S = 0.25
"""Time beyond the limit in which a worker may end a slow coroutine itself."""
MAX_STARTS = 5
"""Attempts to start one worker."""
MAX_FILE_BYTES = 1 << 30
MAX_OPEN_FILES = 512
MAX_MORE_TASKS = 1024
ONE_THREAD: dict[str, str] = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Workers share the cores, and only a process without other threads forks safely."""


class RewardWorkers:
    """`recipes`: name and plain options of every reward that may be asked for; `size`: processes at most."""

    def __init__(self, recipes: Sequence[Mapping[str, Any]], size: int, memory_mb: int) -> None:
        self._recipes = [dict(recipe) for recipe in recipes]
        self._limits = Limits(memory_mb, MAX_FILE_BYTES, MAX_OPEN_FILES, MAX_MORE_TASKS)
        self._server: ForkServer | None = None
        self._relay: Relay | None = None
        self._slots = asyncio.Semaphore(size)
        self._idle: list[Child] = []

    async def score(self, reward: str, style: Style, limit_s: float, group: EncodedGroup) -> list[Outcome]:
        """One outcome per rollout; a breach of contract is raised."""
        outcomes: dict[int, Outcome] = {}
        suspects: set[int] = set()
        while left := [index for index in range(group.num_rollouts) if index not in outcomes]:
            if style == "together" and suspects:
                left = left[:1]  # several ran at once, and it is not known which of them broke the worker
            task = Task(reward, tuple(left), limit_s, group)
            done, failed = await self._run(task, encode(task), style)
            outcomes |= done
            blamed = [index for index in left if index not in done]
            blamed = blamed[:1] if style == "each" else blamed
            is_sure = failed == late(limit_s) and (style != "together" or len(left) == 1)
            if failed and (is_sure or suspects.issuperset(blamed)):
                outcomes |= dict.fromkeys(blamed, failed)
            suspects.update(blamed)
        return [outcomes[index] for index in range(group.num_rollouts)]

    def close(self) -> None:
        """Ends every process; workers start again if they are needed."""
        for worker in self._idle:
            worker.close()
        self._idle.clear()
        if self._server is not None and self._relay is not None:
            self._server.close()
            self._relay.close()
        self._server = self._relay = None

    async def _run(self, task: Task, content: bytes, style: Style) -> tuple[dict[int, Outcome], Failed | None]:
        """The outcomes, and why some are missing, if any are."""
        async with self._slots:
            while self._idle and not self._idle[-1].is_alive:  # it may have died with its server
                self._idle.pop().close()
            worker = self._idle.pop() if self._idle else await self._started()
            done: dict[int, Outcome] = {}
            try:
                failed = await _work(worker, task, content, style, done)
            except BaseException:  # the run is being cancelled, or the contract was broken
                worker.kill()
                raise
            if failed is None:
                self._idle.append(worker)
            else:
                await worker.bury()
            return done, failed

    async def _started(self) -> Child:
        if self._server is None:
            self._relay = Relay()
            self._server = ForkServer(
                "podium.reward.isolation.worker:Worker",
                {"recipes": self._recipes},
                is_shared=True,
                start_s=START_S,
                environment=ONE_THREAD,
                limits=self._limits,
                output=self._relay.descriptor,  # a reward's prints must not mix with the run's own output
            )
        for attempt in range(MAX_STARTS):
            await asyncio.sleep(0.1 * attempt)
            try:
                return await self._server.fork()
            except StartError as error:
                raise RewardFailedError(f"reward workers cannot be started: {error}") from None
            except (RemoteError, TimeoutError) as error:  # no room for one more
                warn(f"podium: a reward worker cannot be started: {error}")
        raise RewardFailedError(f"reward workers cannot be started: {MAX_STARTS} attempts failed, see stderr")


async def _work(worker: Child, task: Task, content: bytes, style: Style, done: dict[int, Outcome]) -> Failed | None:
    """Fills `done` as outcomes arrive and returns why some are missing, if any are; a breach of contract is raised.

    The limit of a call counts from the outcome before it. Calls that run at the same time, and the one call of a
    batched reward, have a common limit that counts from the start.
    """
    loop, missing = asyncio.get_running_loop(), set(task.indices)
    try:
        await worker.send("score", content, task.limit_s)
        deadline = loop.time() + task.limit_s + (GRACE_S if style == "together" else 0.0)
        while missing:
            index, outcome = decode_outcome(await worker.receive(deadline - loop.time(), MAX_REPLY), missing)
            missing.discard(index)
            done[index] = outcome
            if style == "each":
                deadline = loop.time() + task.limit_s
        if not worker.has_sent_more:
            return None
    except TimeoutError:
        return late(task.limit_s)
    except DiedError as death:
        return Failed(_described(death.status))
    except CallError as error:
        return Failed(str(error))
    except (GarbledError, ValueError):
        pass
    return Failed("its process sent what no reward returns")


def _described(status: int | None) -> str:
    """How the process ended, in words."""
    if status == OUT_OF_MEMORY:
        return "its process ran out of memory, see scoring.worker_memory_mb"
    if status == -signal.SIGXCPU:
        return "its processor time was used up"
    return how_it_ended(status)
