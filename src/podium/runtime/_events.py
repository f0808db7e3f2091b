"""What happened when, as lines of events.jsonl: around stages that know nothing of it.

`sampling` (prompts were sent), `group` (one came back whole), `training` and `trained`, `pushed` (an engine took new
weights and proved it). Tests and people read from them what overlapped and in which order.
"""

import time
from collections.abc import AsyncIterator, Sequence

from podium.records import Batch, Group, Prompt, UpdateResult
from podium.run_folder import RunFolder
from podium.runtime._around import Around
from podium.stages import Engine, RolloutStage, Sync, Trainer


class LoggedRollout:
    def __init__(self, rollout: RolloutStage, folder: RunFolder) -> None:
        self._rollout, self._folder = rollout, folder

    async def start(self, prompts: Sequence[Prompt]) -> AsyncIterator[Group]:
        self._folder.event("sampling", ordinals=[prompt.ordinal for prompt in prompts])
        async for group in self._rollout.start(prompts):
            if group.rollouts:
                newest = max(rollout.policy_version_max for rollout in group.rollouts)
                self._folder.event("group", ordinal=group.prompt.ordinal, policy_version=[group.oldest_version, newest])
            else:
                self._folder.event("dropped_group", ordinal=group.prompt.ordinal, retries=group.num_retries)
            yield group


class LoggedTrainer(Around):
    def __init__(self, trainer: Trainer, folder: RunFolder) -> None:
        super().__init__(trainer)
        self._folder = folder

    async def step(self, batches: Sequence[Batch]) -> UpdateResult:
        self._folder.event("training", batches=len(batches))
        started = time.monotonic()
        result = await self._stage.step(batches)
        self._folder.event("trained", updated=result.updated, seconds=time.monotonic() - started)
        return result


class LoggedSync(Around):
    def __init__(self, sync: Sync, engine: Engine, folder: RunFolder) -> None:
        super().__init__(sync)
        self._engine, self._folder = engine, folder

    async def push(self, version: int) -> None:
        before, started = self._engine.policy_version, time.monotonic()
        await self._stage.push(version)
        if self._engine.policy_version != before:
            channel = type(self._stage).__name__.lower()
            self._folder.event("pushed", policy_version=version, channel=channel, seconds=time.monotonic() - started)
