"""A reward worker: what it is asked, what it does, what it replies.

It is asked a `Task`, one reward on some rollouts of a group, and sends one `Reply` per rollout. Both are records of the
one codec (remote/codec.py): plain data, never pickles. The driver reads a reply as if a stranger had sent it, because a
worker runs code that may have gone wrong. The rewards are loaded once, by the process that forks the workers
(remote/fork_server.py).
"""

import asyncio
import os
import random
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.errors import RewardContractError
from podium.records import Group, Prompt, Rollout
from podium.remote.codec import decode, encode
from podium.remote.fork_server_process import limit_processor_time
from podium.reward.sandbox.inside.limits import hide_from_others
from podium.reward.scoring.contract import Failed, Normalised, Outcome, bound_reward, call_reward, style_of
from podium.settings.lookup import find, validate_options

MAX_REPLY = 1 << 16
"""Bytes."""
MAX_REASON = 1000
"""Characters."""
OUT_OF_MEMORY = 77
"""Exit code of a worker that gives up because its memory is full."""


# ---- what is sent


@dataclass(frozen=True)
class EncodedGroup:
    """A group as it is sent to workers, encoded once for all of its rewards."""

    ordinal: int
    num_rollouts: int
    prompt: bytes
    rollouts: bytes


@dataclass(frozen=True)
class Task:
    """One reward to call on some rollouts of a group."""

    reward: str
    indices: tuple[int, ...]
    limit_s: float
    """Limit of one call. The driver enforces it; the worker only limits its processor time by it."""
    group: EncodedGroup

    def prompt(self) -> Prompt:
        """A new object for each call, which may change it."""
        return decode(Prompt, self.group.prompt)

    def rollouts(self) -> tuple[Rollout, ...]:
        return decode(tuple[Rollout, ...], self.group.rollouts)


@dataclass(frozen=True)
class Reply:
    """The outcome of one rollout."""

    index: int
    outcome: Outcome = None
    breach: str | None = None
    """How the reward broke its contract."""


def encode_group(group: Group) -> EncodedGroup:
    """`InputError` if the prompt holds anything but plain data."""
    rollouts = encode(group.rollouts, tuple[Rollout, ...])
    return EncodedGroup(group.prompt.ordinal, len(group.rollouts), encode(group.prompt), rollouts)


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


# ---- what runs in the process


class Worker:
    """`recipes`: name and plain options of every reward."""

    def __init__(self, recipes: Sequence[Mapping[str, Any]]) -> None:
        self._rewards = {recipe["name"]: _load(recipe) for recipe in recipes}
        self._loop: asyncio.AbstractEventLoop | None = None

    def score(self, content: bytes, reply: Callable[[bytes], None]) -> None:
        """Replies with one outcome per rollout of the task."""
        task: Task = decode(Task, content)
        rollouts = task.rollouts()
        reward = self._rewards[task.reward]
        style = style_of(reward)
        hide_from_others()  # a program in the weak sandbox runs beside this process
        random.seed(task.group.ordinal)  # what a reward draws does not depend on which worker it runs in
        limit_processor_time(task.limit_s * len(task.indices))
        chosen = {index: rollouts[index] for index in task.indices}
        limit_s = task.limit_s if style == "together" else None

        def report(index: int, outcome: Outcome) -> None:
            if isinstance(outcome, Failed) and outcome.reason.startswith("MemoryError"):
                os._exit(OUT_OF_MEMORY)  # earlier calls may have filled the memory: a fresh worker tells
            reply(encode_outcome(index, outcome))

        calls = call_reward(task.reward, reward, style, task.prompt, chosen, report, limit_s)
        try:
            self._own_loop().run_until_complete(calls)
        except RewardContractError as breach:
            reply(encode_outcome(task.indices[0], breach))

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        """Created in the worker, because processes must not share a loop, and kept, because rewards may keep
        connections in it."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop


def _load(recipe: Mapping[str, Any]) -> Any:
    name = recipe["name"]
    found = find("reward", name)
    reward = bound_reward(found, validate_options(f"reward {name!r}", found, recipe["options"]))
    if isinstance(reward, Normalised):
        _ = reward.instance  # created here, once for all workers
    return reward
