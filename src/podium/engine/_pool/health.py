"""Whether a member is still there and still works.

Three signs, watched at the same time. Its process: an end is noticed at once. Its event loop: asked several times a
second, and three answers in a row that do not come mean that it is frozen. Its working path: a token is generated every
few seconds, which may take longer, since a large batch may be before it.
"""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from time import monotonic
from typing import Any

from podium.engine._pool.members import Member, Worker
from podium.errors import EngineError, PodiumError
from podium.records import Request, Sampling

MISSES = 3
"""In a row, before a member is taken for frozen or broken."""
PAUSE_S = 0.5
"""Between two questions to the event loop."""
LATE_S = 0.5
"""A wait that overran by so much says that this process was late, not the member."""
DEATH_S = 0.3
"""A process that dies breaks its requests off a moment before its end is known."""
ONE_TOKEN = (Request(0, (1, 1), (0,)),), Sampling(max_new_tokens=1, temperature=0.0)


@dataclass(frozen=True)
class Pulse:
    """How long a member may be silent."""

    frozen_s: float
    stalled_s: float | None
    """None: it writes no tokens."""


async def lost(member: Member, pulse: Pulse) -> str:
    """Waits until the member is lost and says why: by the end of its process, if that is what was behind it."""
    ending = asyncio.ensure_future(member.worker.exited())
    others = [frozen(member.worker, pulse.frozen_s), asyncio.shield(member.fault)]
    if pulse.stalled_s is not None:
        others.append(stalled(member, pulse.stalled_s))
    watchers = {ending, *map(asyncio.ensure_future, others)}
    try:
        done, _ = await asyncio.wait(watchers, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            await asyncio.wait({ending}, timeout=DEATH_S)
        sign = ending if ending.done() else done.pop()
        return sign.result()
    finally:
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)


async def frozen(worker: Worker, limit_s: float) -> str:
    """Returns once the event loop has been silent for about `limit_s`."""
    allowed, misses = limit_s / MISSES, 0
    while misses < MISSES:
        asked = monotonic()
        try:
            async with asyncio.timeout(allowed):
                await worker.ping()
            misses = 0
            await asyncio.sleep(PAUSE_S)
        except (TimeoutError, OSError, PodiumError) as error:
            took = monotonic() - asked
            misses += took < allowed + LATE_S
            if not isinstance(error, TimeoutError):
                await asyncio.sleep(max(0.0, allowed - took))
    return f"frozen: no sign of life for {limit_s:g} s"


async def stalled(member: Member, limit_s: float) -> str:
    """Returns once it does not generate any more. Taking new weights has a limit of its own and is no stall."""
    misses = 0
    while True:
        loads = member.loads
        try:
            async with asyncio.timeout(limit_s):
                await one_token(member.worker.engine)
            misses = 0
        except TimeoutError:
            if member.loads == loads and loads % 2 == 0:
                return f"stalled: not a token within {limit_s:g} s"
        except (OSError, PodiumError) as error:
            misses += 1
            if misses == MISSES:
                return f"broken: {error}"
        await asyncio.sleep(min(limit_s, 10 * PAUSE_S))


async def one_token(engine: Any) -> None:
    """Through the working path."""
    async with aclosing(engine.generate(*ONE_TOKEN)) as answers:
        async for _ in answers:
            return
    raise EngineError("no answer to a request for one token")
