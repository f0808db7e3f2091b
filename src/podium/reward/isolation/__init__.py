"""Rewards in killable workers: what the driver asks, what a worker does and replies, and who is to blame if one breaks.

A task is one reward on some rollouts of a group; a worker sends one `Reply` per rollout. Both are records of the one
codec (remote/codec.py): plain data, never pickles. The driver reads a reply as if a stranger had sent it, because a
worker runs code that may have gone wrong. The rollout at fault abstains; a fresh worker scores the others. A call whose
worker died is repeated once, because the cause may have been outside (memory taken by other programs).
"""

import asyncio
import decimal
import os
import random
import signal
from collections.abc import Callable, Container, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

from podium.errors import RewardContractError, RewardFailedError
from podium.records import Group, Prompt, Rollout
from podium.remote.codec import decode, encode
from podium.remote.fork_server import CallError, Child, DiedError, GarbledError, StartError, how_it_ended
from podium.remote.fork_server_process import limit_processor_time
from podium.remote.workers import Workers
from podium.reward.sandbox.inside.limits import hide_from_others
from podium.reward.scoring.stage import Failed, Normalised, Outcome, Style, bound_reward, call_reward, late, style_of
from podium.settings.lookup import find, validate_options

GRACE_S = 0.25
"""Time beyond the limit in which a worker may end a slow coroutine itself."""
MAX_REPLY = 1 << 16
"""Bytes."""
MAX_REASON = 1000
"""Characters."""
OUT_OF_MEMORY = 77
"""Exit code of a worker that gives up because its memory is full."""


# ---- what is sent


@dataclass(frozen=True)
class Task:
    """One reward to call on some rollouts of a group."""

    reward: str
    indices: tuple[int, ...]
    limit_s: float
    """Limit of one call. The driver enforces it; the worker only limits its processor time by it."""
    ordinal: int
    prompt: bytes
    """Encoded: each call gets an object of its own, which it may change."""
    rollouts: bytes
    """All rollouts of the group, encoded once for all tasks."""


@dataclass(frozen=True)
class Reply:
    """The outcome of one rollout."""

    index: int
    outcome: Outcome = None
    breach: str | None = None
    """How the reward broke its contract."""


def encode_outcome(index: int, outcome: Outcome | RewardContractError) -> bytes:
    """What a worker sends for one rollout."""
    if isinstance(outcome, RewardContractError):
        return encode(Reply(index, breach=str(outcome)[:MAX_REASON]))
    return encode(Reply(index, Failed(outcome.reason[:MAX_REASON]) if isinstance(outcome, Failed) else outcome))


def decode_outcome(content: bytes, expected: Container[int]) -> tuple[int, Outcome]:
    """`ValueError` for what no worker of ours would send; a breach of contract is raised as `RewardContractError`."""
    reply: Reply = decode(Reply, content)
    if reply.breach is not None:  # whichever rollout it was, the run stops
        raise RewardContractError(reply.breach)
    if reply.index not in expected:
        raise ValueError(f"rollout {reply.index} was not asked for, or is answered already")
    return reply.index, reply.outcome


# ---- the driver's side


class RewardWorkers(Workers):
    """`recipes`: name and plain options of every reward that may be asked for; `size`: processes at most."""

    def __init__(self, recipes: Sequence[Mapping[str, Any]], size: int, memory_mb: int) -> None:
        super().__init__(f"{__name__}:Worker", {"recipes": [dict(recipe) for recipe in recipes]}, size, memory_mb)

    async def score(self, reward: str, style: Style, limit_s: float, group: Group) -> list[Outcome]:
        """One outcome per rollout; a breach of contract is raised. `InputError` if the prompt is not plain data."""
        prompt, rollouts = encode(group.prompt), encode(group.rollouts, tuple[Rollout, ...])
        outcomes: dict[int, Outcome] = {}
        suspects: set[int] = set()
        while left := [index for index in range(len(group.rollouts)) if index not in outcomes]:
            if style == "together" and suspects:
                left = left[:1]  # several ran at once, and it is not known which of them broke the worker
            task = Task(reward, tuple(left), limit_s, group.prompt.ordinal, prompt, rollouts)
            try:
                async with self.lend() as worker:
                    failed = await _work(worker, task, style, outcomes)
                    if failed is not None:
                        await worker.bury()
            except StartError as error:
                raise RewardFailedError(f"reward workers cannot be started: {error}") from None
            blamed = [index for index in left if index not in outcomes]
            blamed = blamed[:1] if style == "each" else blamed
            is_sure = failed == late(limit_s) and (style != "together" or len(left) == 1)
            if failed and (is_sure or suspects.issuperset(blamed)):
                outcomes |= dict.fromkeys(blamed, failed)
            suspects.update(blamed)
        return [outcomes[index] for index in range(len(group.rollouts))]


async def _work(worker: Child, task: Task, style: Style, outcomes: dict[int, Outcome]) -> Failed | None:
    """Adds to `outcomes` as they arrive, and returns why some are missing, if any are. Raises a breach of contract.

    The limit of a call counts from the outcome before it. Calls that run at the same time, and the one call of a
    batched reward, have a common limit that counts from the start.
    """
    loop, missing = asyncio.get_running_loop(), set(task.indices)
    try:
        await worker.send("score", encode(task), task.limit_s)
        deadline = loop.time() + task.limit_s + (GRACE_S if style == "together" else 0.0)
        while missing:
            index, outcome = decode_outcome(await worker.receive(deadline - loop.time(), MAX_REPLY), missing)
            missing.discard(index)
            outcomes[index] = outcome
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


# ---- what runs in the process


class Worker:
    """`recipes`: name and plain options of every reward."""

    def __init__(self, recipes: Sequence[Mapping[str, Any]]) -> None:
        self._rewards = {recipe["name"]: _load(**recipe) for recipe in recipes}
        self._runner = asyncio.Runner()
        """Makes its event loop at the first call, because processes must not share one, and keeps it, because rewards
        may keep connections in it."""

    def score(self, content: bytes, reply: Callable[[bytes], None]) -> None:
        """Replies with one outcome per rollout of the task."""
        task: Task = decode(Task, content)
        rollouts = decode(tuple[Rollout, ...], task.rollouts)
        reward = self._rewards[task.reward]
        style = style_of(reward)
        hide_from_others()  # a program in the weak sandbox runs next to this process
        random.seed(task.ordinal)  # what a reward draws does not depend on which worker it runs in
        limit_processor_time(task.limit_s * len(task.indices))
        chosen = {index: rollouts[index] for index in task.indices}
        limit_s = task.limit_s if style == "together" else None
        prompt = partial(decode, Prompt, task.prompt)

        def report(index: int, outcome: Outcome) -> None:
            if isinstance(outcome, Failed) and outcome.reason.startswith("MemoryError"):
                os._exit(OUT_OF_MEMORY)  # earlier calls may have filled the memory: a fresh worker will show
            reply(encode_outcome(index, outcome))

        try:
            call = call_reward(task.reward, reward, style, prompt, chosen, report, limit_s)
            context = copy_context()  # what a reward sets in it is gone at the next call
            context.run(decimal.setcontext, decimal.Context())  # an object that copies would share
            self._runner.run(call, context=context)
        except RewardContractError as breach:
            reply(encode_outcome(task.indices[0], breach))


def _load(name: str, options: Mapping[str, Any]) -> Any:
    found = find("reward", name)
    reward = bound_reward(found, validate_options(f"reward {name!r}", found, options))
    if isinstance(reward, Normalised):
        _ = reward.instance  # created here, once for all workers
    return reward
