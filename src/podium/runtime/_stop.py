"""A signal in the middle of sampling: the rollouts are given up, the last whole step is committed.

While a step trains, the signal waits for its end; so at most one step of work is lost, and it is sampled again, with
the same tokens, when the run goes on.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, cast

from podium.errors import RunStopped
from podium.records import Batch, Group, Plan, Prompt, RunState, UpdateResult
from podium.runtime._around import Around
from podium.stages import Stages

POLL_S = 0.1


def stoppable(stages: Stages, plan: Plan) -> Stages:
    """The same stages; sampling ends with `RunStopped` once a stop is asked for, if the window has not trained yet.

    The async loop needs none of it: it looks for signals while it waits.
    """
    if plan.max_lag:
        return stages
    window = Window()
    return replace(
        stages,
        rollout=StoppableRollout(stages.rollout, lambda: stages.stop_requested() and not window.has_trained),
        trainer=cast(Any, NotingTrainer(stages.trainer, window)),
        checkpoint=cast(Any, NotingCheckpoint(stages.checkpoint, window)),
    )


class Window:
    """Whether the weights have moved since the end of the last window."""

    has_trained = False


class StoppableRollout:
    def __init__(self, rollout: Any, is_stopping: Callable[[], bool]) -> None:
        self._rollout, self._is_stopping = rollout, is_stopping

    async def start(self, prompts: Sequence[Prompt]) -> AsyncIterator[Group]:
        async with aclosing(self._rollout.start(prompts)) as groups:
            while (group := await self._next(groups)) is not None:
                yield group

    async def _next(self, groups: Any) -> Group | None:
        """The next group; asked for in a task of its own, which is cancelled where nobody waits for it any more."""
        coming = asyncio.ensure_future(anext(groups, None))
        try:
            while not coming.done():
                if self._is_stopping():
                    raise RunStopped
                await asyncio.wait({coming}, timeout=POLL_S)
            return coming.result()
        finally:
            if not coming.done():
                coming.cancel()
                with suppress(asyncio.CancelledError):
                    await coming


class NotingTrainer(Around):
    def __init__(self, trainer: Any, window: Window) -> None:
        super().__init__(trainer)
        self._window = window

    async def step(self, batches: Sequence[Batch]) -> UpdateResult:
        self._window.has_trained = True
        return await self._stage.step(batches)


class NotingCheckpoint(Around):
    def __init__(self, checkpoint: Any, window: Window) -> None:
        super().__init__(checkpoint)
        self._window = window

    async def commit_if_due(self, state: RunState) -> None:
        await self._stage.commit_if_due(state)
        self._window.has_trained = False
