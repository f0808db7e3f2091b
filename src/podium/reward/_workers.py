"""The driver's side of reward workers: who runs what, for how long, and what happens when one breaks.

A task is one reward on one group. Its time is taken here, outside the process that it runs in, and a worker that is
late is killed with its whole process group: no thread, alarm or coroutine can stop a regular expression, a big integer
or a C library. The rollout at fault abstains, the others are scored by a fresh worker. A worker that died is given
the same call once more, since the cause may have been outside (memory taken by others), and then no more.

Lives in one event loop; `close` may be called after it.
"""

import asyncio
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from podium.errors import RewardFailedError
from podium.processes import how_it_ended
from podium.reward._calls import late
from podium.reward._contract import Style
from podium.reward._conversation import Fate, Worker
from podium.reward._messages import OUT_OF_MEMORY, EncodedGroup, Failed, Outcome, Task, encode_task
from podium.reward._template import START_S, Template

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
            while self._idle and not self._idle[-1].is_alive:  # it may have gone with its template
                self._idle.pop().close()
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
            if fate == "late":
                return done, late(task.limit_s)
            return done, Failed("its process sent what no reward returns" if fate == "garbled" else _described(status))

    async def _started(self) -> Worker:
        for attempt in range(MAX_STARTS):
            await asyncio.sleep(0.1 * attempt)
            worker = Worker(await self._template.fork())
            try:
                await worker.greet(START_S)
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


def _described(status: int | None) -> str:
    """How a process ended, in words."""
    if status == OUT_OF_MEMORY:
        return "its process ran out of memory, see scoring.worker_memory_mb"
    if status == -signal.SIGXCPU:
        return "its processor time was used up"
    return how_it_ended(status)
