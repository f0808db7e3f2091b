"""The stages of the loop in the driver: each sends its work as tasks and takes each answer once.

    rollout ──► write_rollouts, a task for some prompts ──► groups, in the order of the prompts
    reward  ──► score_group, a task for each group as it arrives, while later ones are still written
    trainer ──► train_step ──► its whole state and the weights for engines, as folders, from step to step

An answer is taken only if it was asked for: by run and step, by ordinal and sample. An answer that comes twice counts
once.
"""

import asyncio
import math
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import save_file

import podium.errors
from podium.errors import EngineError, PodiumError
from podium.records import Batch, Group, Plan, Prompt, RunState, UpdateResult
from podium.remote.codec import from_json, to_json
from podium.run.checkpoint import TENSORS
from podium.run.folder import RunFolder
from podium.runtime.on_flyte import tasks
from podium.runtime.on_flyte.environments import RETRIES
from podium.runtime.on_flyte.replica import Reply, Step, read_state, release, stored, write_batches
from podium.runtime.on_flyte.sdk import Dir, errors, flyte, storage


class Sender:
    """Sends tasks of one run, in the group of the step that they are for, and notes them in the event log."""

    def __init__(self, job: str, base: Dir, folder: RunFolder) -> None:
        self.job, self.base, self._folder = job, base, folder
        self.step = 0
        """The last step that was trained."""

    async def send(self, task: Any, noted: Mapping[str, Any], **inputs: Any) -> Any:
        """What the task returns; a `PodiumError` of the task is raised as such. `noted` goes into the event log."""
        step, started = self.step + 1, time.monotonic()
        told = {"task": task.short_name, "step": step, **noted}
        self._event("task", **told)
        with flyte.group(f"iter-{step}"):
            try:
                reply = await task(job=self.job, **inputs)
            except errors.BaseRuntimeError as error:
                self._event("task_failed", **told, error=error.code)
                raise as_podium_error(error, task.short_name) from error
        self._event("task_done", **told, seconds=time.monotonic() - started)
        return reply

    def _event(self, kind: str, **details: Any) -> None:
        if self._folder.path.joinpath("lock").exists():  # nothing is written before the run is known to be good
            self._folder.event(kind, **details)


def as_podium_error(error: errors.BaseRuntimeError, task: str) -> PodiumError:
    kind = getattr(podium.errors, error.code, None)
    if isinstance(kind, type) and issubclass(kind, PodiumError):
        return kind(str(error))
    return EngineError(f"the task {task} failed for good: {error.code}: {error}; LOG_LEVEL=error shows what Flyte says")


class Engines:
    """The rollout containers as the driver knows them: the weights that the next tasks use."""

    policy_version: int | None = None
    weights: Dir
    probe_logprobs: Sequence[float]

    def take(self, version: int, step: Step) -> None:
        self.policy_version, self.weights, self.probe_logprobs = version, step.weights, step.probe_logprobs

    def close(self) -> None:
        """In local mode the engines of the tasks are in this process; a container ends with its pool."""
        release()


class RemoteRollout:
    """`prompts_per_task`: None gives each replica an equal share. `purpose` is "train" or "eval"."""

    def __init__(
        self,
        sender: Sender,
        engines: Engines,
        replicas: int,
        purpose: str,
        rollouts_per_prompt: int,
        prompts_per_task: int | None = None,
    ) -> None:
        self._sender, self._engines, self._replicas = sender, engines, replicas
        self._purpose, self._rollouts_per_prompt = purpose, rollouts_per_prompt
        self._prompts_per_task = prompts_per_task

    async def start(self, prompts: Sequence[Prompt]) -> AsyncIterator[Group]:
        """Sends all tasks at once. Prompts of a task that is lost for good come without rollouts; if all tasks are
        lost, the run ends."""
        size = self._prompts_per_task or max(1, math.ceil(len(prompts) / self._replicas))
        parcels = [prompts[first : first + size] for first in range(0, len(prompts), size)]
        writing = [asyncio.create_task(self._write(parcel)) for parcel in parcels]
        failures: list[EngineError] = []
        try:
            for parcel, task in zip(parcels, writing, strict=True):
                try:
                    groups = await task
                except EngineError as error:
                    failures.append(error)
                    if len(failures) == len(parcels):
                        raise
                    groups = [Group(prompt, (), num_retries=RETRIES) for prompt in parcel]
                for group in groups:
                    yield group
        finally:
            for task in writing:
                task.cancel()
            await asyncio.gather(*writing, return_exceptions=True)

    async def _write(self, prompts: Sequence[Prompt]) -> list[Group]:
        """One task, with the weights that are current when it is sent."""
        version = self._engines.policy_version
        assert version is not None, "pushed before the first rollout"
        text = await self._sender.send(
            tasks.write_rollouts,
            {"ordinals": [prompt.ordinal for prompt in prompts], "purpose": self._purpose, "policy_version": version},
            base=self._sender.base,
            step=self._sender.step + 1,
            purpose=self._purpose,
            prompts=to_json(prompts, list[Prompt]),
            version=version,
            weights=self._engines.weights,
            probe_logprobs=list(self._engines.probe_logprobs),
        )
        return _asked_for(from_json(list[Group], text), prompts, self._rollouts_per_prompt, version)


def _asked_for(groups: Sequence[Group], prompts: Sequence[Prompt], count: int, version: int) -> list[Group]:
    """A group for each prompt, in order of the prompts. A second answer, or one that was not asked for, is ignored."""
    by_ordinal: dict[int, Group] = {}
    for group in groups:
        by_ordinal.setdefault(group.prompt.ordinal, group)
    taken = []
    for prompt in prompts:
        group = by_ordinal.get(prompt.ordinal)
        if group is None or group.prompt.token_ids != prompt.token_ids:
            raise EngineError(f"a rollout task left prompt {prompt.ordinal} unanswered")
        samples = [rollout.sample_index for rollout in group.rollouts]
        versions = {(rollout.policy_version_min, rollout.policy_version_max) for rollout in group.rollouts}
        if group.rollouts and (samples != list(range(count)) or versions != {(version, version)}):
            raise EngineError(
                f"prompt {prompt.ordinal}: asked for {count} rollouts of policy version {version}, got samples "
                f"{samples} of versions {sorted(versions)}"
            )
        taken.append(replace(group, prompt=prompt))
    return taken


def remote_score(sender: Sender) -> Callable[[Group], Any]:
    """Scores a group by a task. Only the rewards are taken from the answer; prompt and rollouts stay the driver's."""

    async def score(group: Group) -> Group:
        if not group.rollouts:
            return group
        started = time.monotonic()
        noted = {"ordinal": group.prompt.ordinal}
        text = await sender.send(tasks.score_group, noted, step=sender.step + 1, group=to_json(group))
        scored = from_json(Group, text)
        if scored.prompt.ordinal != group.prompt.ordinal or len(scored.rewards) != len(group.rollouts):
            raise EngineError(f"a reward task scored something else than prompt {group.prompt.ordinal}")
        return replace(scored, prompt=group.prompt, rollouts=group.rollouts, scoring_s=time.monotonic() - started)

    return score


class RemoteTrainer:
    """The trainer's whole state is a folder that goes from task to task; the driver keeps its place."""

    def __init__(self, sender: Sender, start: Step, plan: Plan) -> None:
        self._sender, self._now = sender, start
        self._version = 0
        self._restored: dict[str, torch.Tensor] | None = None
        """The state of a checkpoint, until it is stored for tasks to read."""
        self._states, self._weights = [start.state], [start.weights]
        self._num_weights = max(1, plan.sync_every) + plan.max_lag + 2
        """How many published weights are kept for tasks under way."""
        self._keeps_first = plan.sync_every == 0

    async def step(self, batches: Sequence[Batch]) -> UpdateResult:
        await self._settle()
        step, version = self._sender.step + 1, self._version + 1
        packed = await stored(f"batches-{step:06d}", lambda folder: write_batches(folder, batches))
        inputs = {"base": self._sender.base, "step": step, "version": version, "state": self._now.state}
        reply = await self._sender.send(tasks.train_step, {}, batches=packed, **inputs)
        after, said = step_of_reply(reply)
        result = said.result
        assert result is not None
        self._version += result.updated
        # Without an update, weights and version stay the same; the state may differ in its random state.
        self._sender.step = step
        if result.updated:
            self._now = after
            await self._forget(packed)
        else:
            self._now = replace(self._now, state=after.state)
            await self._forget(packed, after.weights)
        return result

    async def published(self) -> tuple[int, Step]:
        """The current weights and their version, for engines."""
        await self._settle()
        return self._version, self._now

    def state(self) -> Mapping[str, torch.Tensor]:
        """Called in another thread than the event loop."""
        return self._restored or asyncio.run(read_state(self._now.state))

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._restored = dict(tensors)

    def is_at(self, state: RunState) -> None:
        """Sets step and version, once the checkpoint is read."""
        self._sender.step, self._version = state.step, state.policy_version

    def save_model(self, folder: str) -> None:
        """Called in another thread than the event loop, which sends the task."""
        sent = asyncio.run_coroutine_threadsafe(self._save(), self._loop)
        shutil.copytree(sent.result(), folder, dirs_exist_ok=True)

    async def _save(self) -> str:
        await self._settle()
        inputs = {"base": self._sender.base, "step": self._sender.step, "state": self._now.state}
        model: Dir = await self._sender.send(tasks.save_model, {}, **inputs)
        return await model.download()

    async def _settle(self) -> None:
        """Stores a restored state where tasks read it, and publishes its weights."""
        self._loop = asyncio.get_running_loop()
        if self._restored is None:
            return
        restored, step = self._restored, self._sender.step
        state = await stored(f"state-{step:06d}", lambda folder: save_file(restored, folder / TENSORS))
        inputs = {"base": self._sender.base, "step": step, "version": self._version, "state": state}
        self._now, _ = step_of_reply(await self._sender.send(tasks.describe_state, {}, **inputs))
        self._restored = None
        await self._forget()

    async def _forget(self, *used: Dir) -> None:
        """Removes states and weights that no task needs any more: a checkpoint has its own copy."""
        self._states.append(self._now.state)
        if not self._weights or self._weights[-1] is not self._now.weights:
            self._weights.append(self._now.weights)
        old = [self._states.pop(0) for _ in range(len(self._states) - 2)]
        first = int(self._keeps_first)
        old += [self._weights.pop(first) for _ in range(len(self._weights) - self._num_weights - first)]
        for place in (*used, *old):
            await asyncio.to_thread(_remove, place.path)


def step_of_reply(reply: tuple[str, Dir, Dir]) -> tuple[Step, Reply]:
    text, state, weights = reply
    said = from_json(Reply, text)
    return Step(state, weights, said.probe_logprobs), said


def _remove(path: str) -> None:
    with suppress(Exception):  # whatever a store's client raises: a place that is not removed costs room only
        storage.get_underlying_filesystem(path=path).rm(path, recursive=True)


class Stored:
    """Stage 8: the next rollout tasks name the new weights. Each task proves them: a container that does not hold them
    yet reads them, checks their hashes and answers the probe before it generates a token."""

    def __init__(self, trainer: RemoteTrainer, engines: Engines) -> None:
        self._trainer, self._engines = trainer, engines

    async def push(self, version: int) -> None:
        if self._engines.policy_version != version:
            published, step = await self._trainer.published()
            assert published == version
            self._engines.take(version, step)

    def close(self) -> None:
        """Nothing to do: the run's store ends with the run."""
