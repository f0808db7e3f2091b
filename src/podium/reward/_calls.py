"""Calling a reward on the rollouts of a group, in the driver or in a worker."""

import asyncio
import inspect
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from podium.errors import RewardContractError
from podium.records import Prompt, Rollout
from podium.reward import _classes
from podium.reward._contract import Style, check_value, check_values
from podium.reward._messages import Failed, Outcome

PACKAGE = Path(__file__).parents[1]
AROUND = (__file__, _classes.__file__)
"""Where a reward is called."""


async def call_reward(
    name: str,
    function: Any,
    style: Style,
    prompt: Callable[[], Prompt],
    rollouts: Mapping[int, Rollout],
    report: Callable[[int, Outcome], None],
    limit_s: float | None = None,
) -> None:
    """Reports each rollout's outcome as soon as it is known; a breach of contract is raised.

    `prompt` gives the prompt, made anew where a reward that changes it must not reach its neighbours. `limit_s` ends
    coroutines that wait too long one by one; against all others only killing the process helps.
    """
    if style == "batched":
        outcomes = await _call_batched(name, function, prompt(), list(rollouts.values()))
        for index, outcome in zip(rollouts, outcomes, strict=True):
            report(index, outcome)
        return

    async def call(index: int, rollout: Rollout) -> None:
        given = prompt()
        try:
            async with asyncio.timeout(limit_s):
                value = await _returned(function, given, rollout)
        except TimeoutError:
            value = late(limit_s)
        report(index, value if isinstance(value, Failed) else check_value(name, function, value, given))

    if style == "together":
        await asyncio.gather(*(call(index, rollout) for index, rollout in rollouts.items()))
        return
    for index, rollout in rollouts.items():
        await call(index, rollout)


def late(limit_s: float | None) -> Failed:
    return Failed(f"timeout after {limit_s:g} s")


async def _call_batched(name: str, function: Any, prompt: Prompt, rollouts: list[Rollout]) -> list[Any]:
    values = await _returned(function, prompt, tuple(rollouts))
    if isinstance(values, Failed):
        return [values] * len(rollouts)
    return check_values(name, function, values, len(rollouts), prompt)


async def _returned(function: Any, prompt: Prompt, rollouts: Any) -> Any:
    """What the reward returns, awaited where it must be, or how it failed."""
    try:
        value = function(prompt, rollouts)
        return await value if inspect.isawaitable(value) else value
    except (KeyboardInterrupt, asyncio.CancelledError, RewardContractError):
        raise
    except BaseException as error:  # SystemExit too: a reward does not end the run
        return Failed(_described(error))


def _described(error: BaseException) -> str:
    """What was raised, where in the reward's file, and its text, which may be long."""
    told = type(error).__name__
    with suppress(Exception):  # it may have no trace that can be read
        told += _place(error.__traceback__)
    with suppress(Exception):  # or no text
        told += f": {error}"
    return told


def _place(trace: TracebackType | None) -> str:
    """The last line in the file where the reward begins; nothing for Podium's own."""
    lines = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(trace)]
    own = [(file, number) for file, number in lines if file not in AROUND]
    if not own or PACKAGE in Path(own[0][0]).parents:
        return ""
    file, number = [line for line in own if line[0] == own[0][0]][-1]
    return f" at {Path(file).name}:{number}"
