"""The stages of the loop in the driver: each sends its work as tasks and takes each answer once.

    rollout ──► write_rollouts, a task for some prompts ──► groups, in the order of the prompts
    reward  ──► score_group, a task for each group as it arrives, while later ones are still written
    trainer ──► train_step ──► its whole state and the weights for engines, as folders, from step to step

An answer is taken only if it was asked for: by run and step, by ordinal and sample. An answer that comes twice counts
once. The driver reads the data and holds the ledger, the reports and the checkpoints. Of the model it has only the
tokenizer.
"""

import asyncio
import html
import math
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from podium.data.build import RunData, build_run_data
from podium.engine.build import fitted
from podium.errors import EngineError
from podium.model.load import load_reader
from podium.records import Batch, Group, Plan, Prompt, RunState, UpdateResult
from podium.remote.codec import encode, from_json, to_json
from podium.report.page import Page
from podium.reward.build import check_retirement, check_scoring, scoring_recipe
from podium.run.build import check_space
from podium.run.checkpoint import TENSORS
from podium.run.folder import RunFolder
from podium.runtime.on_flyte import RETRIES, Dir, configure, errors, flyte, report, storage, tasks
from podium.runtime.on_flyte.driver import Driving
from podium.runtime.on_flyte.tasks import BATCHES, Job, Reply, as_podium_error, read_state, release, stored, with_base
from podium.runtime.wiring.stages import Placed, read_rows
from podium.settings.tables import Settings
from podium.stages import Rollouts
from podium.sync.build import probe_ids

FRAME = '<iframe srcdoc="{page}" style="width:100%;height:95vh;border:0" title="Podium"></iframe>'
"""A page is a whole document with its own content policy; Flyte puts what it is given inside another document."""


def place(driving: Driving, settings: Settings, folder: RunFolder, step: int | None) -> Placed:
    """Inside the driver's task: the stages of a run whose rollouts, rewards and training steps are tasks."""
    configure(settings)
    data, tokenizer, job = read(settings, driving.run_id, driving.base)
    sender = Sender(to_json(job), driving.base, folder)
    scoring = job.scoring.build(elsewhere=partial(score_by_task, sender))
    check_scoring(scoring, data.sources)
    check_retirement(settings, scoring, data.train)
    start = asyncio.run(sender.send_to_trainer(tasks.open_trainer, step=0, version=0, state=Dir.empty()))
    memory = start.reply.memory
    assert memory is not None
    check_space(settings, folder, memory, step)
    trainer = RemoteTrainer(sender, start, data.plan)
    weights = Stored(trainer)

    def restored(state: RunState, place: Path | None) -> None:
        """Stores the checkpoint of a resume again: an attempt that ends before its first commit must not lose it."""
        trainer.is_at(state)
        if place is not None:
            driving.store.save(folder, place)

    return Placed(
        data=data,
        tokenizer=tokenizer,
        scoring=scoring,
        rollout=lambda purpose: Rollouts(partial(write_by_tasks, sender, weights, settings, purpose)),
        engine=weights,
        trainer=trainer,
        train=trainer.step,
        sync=weights,
        memory=memory,
        base_digest=start.reply.base_digest,
        restored=restored,
        store=partial(driving.store.save, folder),
        page=LiveReport,
    )


def read(settings: Settings, run_id: str, base: Dir) -> tuple[RunData, Any, Job]:
    """Checks the settings and reads the data, as runtime `local` does: the data, the tokenizer, and what tasks are
    given. No model is loaded."""
    rows = read_rows(settings)
    reader = load_reader(asyncio.run(with_base(settings, base)).model)
    data = build_run_data(settings, *rows, reader)
    job = Job(
        run_id=run_id,
        settings=fitted(settings, data.longest_prompt),
        steps=data.plan.steps,
        longest_prompt=max(data.train.lengths),
        probe=tuple(probe_ids(settings, data.train.in_order)),
        scoring=scoring_recipe(settings, data.sources),
    )
    return data, reader.tokenizer, job


@dataclass(frozen=True)
class Step:
    """The trainer after a step, or at the start of the run: all that the next task and the engines need of it."""

    reply: Reply
    state: Dir
    weights: Dir


class Sender:
    """Sends tasks of one run, in the group of the step that they are for, and notes them in the event log."""

    def __init__(self, job: str, base: Dir, folder: RunFolder) -> None:
        self.job, self.base, self._folder = job, base, folder
        self.step = 0
        """The last step that was trained."""

    async def send(self, task: Any, noted: Mapping[str, Any], **inputs: Any) -> Any:
        """What the task returns; a `PodiumError` of the task is raised as such. `noted` goes into the event log."""
        step, started = self.step + 1, time.monotonic()
        details = {"task": task.short_name, "step": step, **noted}
        self._event("task", **details)
        with flyte.group(f"iter-{step}"):
            try:
                reply = await task(job=self.job, **inputs)
            except errors.BaseRuntimeError as error:
                self._event("task_failed", **details, error=error.code)
                raise as_podium_error(error, task.short_name) from error
        self._event("task_done", **details, seconds=time.monotonic() - started)
        return reply

    async def send_to_trainer(self, task: Any, **inputs: Any) -> Step:
        text, state, weights = await self.send(task, {}, base=self.base, **inputs)
        return Step(from_json(Reply, text), state, weights)

    def _event(self, kind: str, **details: Any) -> None:
        if self._folder.path.joinpath("lock").exists():  # nothing is written before the run is known to be good
            self._folder.event(kind, **details)


async def write_by_tasks(
    sender: Sender, weights: "Stored", settings: Settings, purpose: str, prompts: Sequence[Prompt]
) -> AsyncIterator[Group]:
    """Sends all tasks at once; `purpose` is "train" or "eval". Prompts of a task that is lost for good come without
    rollouts; if all tasks are lost, the run ends."""
    options = settings.runtime.options
    size = options["prompts_per_task"] if purpose == "train" else None
    size = size or max(1, math.ceil(len(prompts) / options["replicas"][1]))
    count = settings.eval.n if purpose == "eval" else settings.plan.rollouts_per_prompt
    parcels = [prompts[first : first + size] for first in range(0, len(prompts), size)]
    writing = [asyncio.create_task(_write(sender, weights, purpose, count, parcel)) for parcel in parcels]
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


async def _write(sender: Sender, weights: "Stored", purpose: str, count: int, prompts: Sequence[Prompt]) -> list[Group]:
    """One task, with the weights that are current when it is sent; `count` rollouts for each prompt."""
    version = weights.policy_version
    assert version is not None, "pushed before the first rollout"
    text = await sender.send(
        tasks.write_rollouts,
        {"ordinals": [prompt.ordinal for prompt in prompts], "purpose": purpose, "policy_version": version},
        base=sender.base,
        step=sender.step + 1,
        purpose=purpose,
        prompts=to_json(prompts, list[Prompt]),
        version=version,
        weights=weights.trained.weights,
        probe_logprobs=list(weights.trained.reply.probe_logprobs),
    )
    return _asked_for(from_json(list[Group], text), prompts, count, version)


def _asked_for(groups: Sequence[Group], prompts: Sequence[Prompt], count: int, version: int) -> list[Group]:
    """A group for each prompt, in order of the prompts. A second answer, or one that was not asked for, is ignored."""
    by_ordinal: dict[int, Group] = {}
    for group in groups:
        by_ordinal.setdefault(group.prompt.ordinal, group)
    taken = []
    for prompt in prompts:
        group = by_ordinal.get(prompt.ordinal)
        if group is None or not _is_of(group.prompt, prompt):
            raise EngineError(f"a rollout task left prompt {prompt.ordinal} unanswered")
        samples = [rollout.sample_index for rollout in group.rollouts]
        versions = {(rollout.policy_version_min, rollout.policy_version_max) for rollout in group.rollouts}
        if group.rollouts and (samples != list(range(count)) or versions != {(version, version)}):
            raise EngineError(
                f"prompt {prompt.ordinal}: asked for {count} rollouts of policy version {version}, got samples "
                f"{samples} of versions {sorted(versions)}"
            )
        found = group.prompt
        taken.append(replace(group, prompt=replace(prompt, token_ids=found.token_ids, messages=found.messages)))
    return taken


def _is_of(found: Prompt, prompt: Prompt) -> bool:
    """Whether a prompt is the one that was asked for; an environment may have added its first messages."""
    if found.token_ids == prompt.token_ids:
        return True
    row = [turn for turn in prompt.messages if turn["role"] != "assistant"]
    return (
        len(found.messages) > len(row)
        and [dict(turn) for turn in row] == [dict(turn) for turn in found.messages][: len(row)]
    )


async def score_by_task(sender: Sender, group: Group) -> Group:
    """Only the rewards are taken from the task's answer; prompt and rollouts stay the driver's."""
    if not group.rollouts:
        return group
    started, ordinal = time.monotonic(), group.prompt.ordinal
    text = await sender.send(tasks.score_group, {"ordinal": ordinal}, step=sender.step + 1, group=to_json(group))
    scored = from_json(Group, text)
    if scored.prompt.ordinal != ordinal or len(scored.rewards) != len(group.rollouts):
        raise EngineError(f"a reward task scored something else than prompt {ordinal}")
    return replace(scored, prompt=group.prompt, rollouts=group.rollouts, scoring_s=time.monotonic() - started)


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
        content = encode(batches, list[Batch])
        packed = await stored(f"batches-{step:06d}", lambda folder: (folder / BATCHES).write_bytes(content))
        after = await self._sender.send_to_trainer(
            tasks.train_step, step=step, version=version, state=self._now.state, batches=packed
        )
        result = after.reply.result
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
        sender = self._sender
        model: Dir = await sender.send(tasks.save_model, {}, base=sender.base, step=sender.step, state=self._now.state)
        return await model.download()

    async def _settle(self) -> None:
        """Stores a restored state where tasks read it, and publishes its weights."""
        self._loop = asyncio.get_running_loop()
        if self._restored is None:
            return
        restored, step = self._restored, self._sender.step
        state = await stored(f"state-{step:06d}", lambda folder: save_file(restored, folder / TENSORS))
        self._now = await self._sender.send_to_trainer(
            tasks.open_trainer, step=step, version=self._version, state=state
        )
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


def _remove(path: str) -> None:
    with suppress(Exception):  # whatever a store's client raises: a place that is not removed costs room only
        storage.get_underlying_filesystem(path=path).rm(path, recursive=True)


class Stored:
    """Stage 8, and the rollout containers as the driver knows them: the next rollout tasks name the new weights. Each
    task proves them: a container that does not hold them yet reads them, checks their hashes and answers the probe
    before it generates a token."""

    policy_version: int | None = None
    trained: Step
    """With the weights of that version."""

    def __init__(self, trainer: RemoteTrainer) -> None:
        self._trainer = trainer

    async def push(self, version: int) -> None:
        if self.policy_version != version:
            published, self.trained = await self._trainer.published()
            assert published == version
            self.policy_version = version

    def close(self) -> None:
        """In local mode the engines of the tasks are in this process; a container ends with its pool."""
        release()


class LiveReport(Page):
    """The run's page, also shown live by Flyte in the report of the driver's task."""

    def _write(self) -> None:
        super()._write()
        page = self._folder.page.read_text(encoding="utf-8")
        report.current_report().get_tab("main").replace(FRAME.format(page=html.escape(page)))
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # the loop is over
            with suppress(Exception):  # a report that cannot be shown stops no run
                report.flush()
            return
        sending = asyncio.ensure_future(report.flush.aio(), loop=loop)
        sending.add_done_callback(lambda done: done.cancelled() or done.exception())
