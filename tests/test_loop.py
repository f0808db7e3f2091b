"""The loop with stages that only note what they are asked: the order of things."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from podium.errors import StalledError
from podium.loop import by_step, train
from podium.records import Group, Plan, Prompt, Rollout, RunState, UpdateResult
from podium.stages import Stages


def a_group(ordinal: int) -> Group:
    rollout = Rollout((1,), (0.0,), (1,), "stop", "", 0, 0, 0, 0, "")
    return Group(Prompt(ordinal, (1,)), (rollout, rollout), rewards=(0.0, 1.0))


class Notes:
    """Every stage at once."""

    def __init__(self, plan: Plan, *, updates: bool = True, stop_after: int | None = None, start: int = 0) -> None:
        self.log: list[Any] = []
        self._plan, self._updates, self._stop_after, self._start = plan, updates, stop_after, start
        self.steps = start

    def stages(self) -> Stages:
        return Stages(
            data=self,
            rollout=_Rollout(),
            reward=self,
            assign_advantages=list,
            filter=list,
            pack=lambda groups: [("batch", tuple(group.prompt.ordinal for group in groups))],  # type: ignore[return-value]
            trainer=_Trainer(self),  # type: ignore[arg-type]
            sync=_Sync(self),
            checkpoint=_Checkpoint(self),
            report=_Report(self),  # type: ignore[arg-type]
            evaluation=_Evaluation(self),
            stop_requested=lambda: self._stop_after is not None and self.steps >= self._stop_after,
        )

    def windows(self, state: RunState):
        ordinal, step = state.next_ordinal, state.step
        while step < self._plan.steps:
            count = min(self._plan.prompts_per_window, (self._plan.steps - step) * self._plan.prompts_per_step)
            yield [Prompt(ordinal + i, (1,)) for i in range(count)]
            ordinal, step = ordinal + count, step + count // self._plan.prompts_per_step

    async def score_each(self, groups: AsyncIterator[Group]) -> AsyncIterator[Group]:
        async for group in groups:
            yield group


class _Rollout:
    async def start(self, prompts):
        for prompt in prompts:
            yield a_group(prompt.ordinal)


class _Trainer:
    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    async def step(self, batches):
        self._notes.log.append(("train", batches[0][1]))
        self._notes.steps += 1
        return UpdateResult(self._notes._updates, 4, {})


class _Sync:
    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    async def push(self, version: int) -> None:
        self._notes.log.append(("push", version))


class _Checkpoint:
    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    async def restore_or_start(self) -> RunState:
        start = self._notes._start
        return RunState(step=start, policy_version=start, next_ordinal=start * 2)

    async def commit_if_due(self, state: RunState) -> None:
        self._notes.log.append(("due?", state.step, state.next_ordinal))

    async def commit(self, state: RunState) -> None:
        self._notes.log.append(("commit", state.step))

    async def finish(self, state: RunState) -> None:
        self._notes.log.append(("finish", state.step))


class _Report:
    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    async def start(self, state) -> None:
        self._notes.log.append(("start", state.step))

    async def write(self, state, groups, kept, result, seconds) -> None:
        self._notes.log.append(("report", state.step))


class _Evaluation:
    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    async def run_if_due(self, state: RunState, since: int) -> None:
        self._notes.log.append(("eval?", since, state.step))


def run(plan: Plan, **options: Any) -> tuple[RunState, list[Any]]:
    notes = Notes(plan, **options)
    return asyncio.run(train(notes.stages(), plan)), notes.log


def test_one_step_at_a_time_is_sample_train_sync() -> None:
    state, log = run(Plan(steps=2, prompts_per_step=2, rollouts_per_prompt=2))
    assert log == [
        ("start", 0), ("push", 0), ("eval?", 0, 0),
        ("train", (0, 1)), ("report", 1), ("push", 1), ("eval?", 0, 1), ("due?", 1, 2),
        ("train", (2, 3)), ("report", 2), ("push", 2), ("eval?", 1, 2), ("due?", 2, 4),
        ("finish", 2),
    ]  # fmt: skip
    assert state == RunState(step=2, policy_version=2, next_ordinal=4, num_rollouts=8, num_tokens=8)


def test_a_window_trains_its_steps_by_ordinal_and_syncs_once() -> None:
    _, log = run(Plan(steps=5, prompts_per_step=2, rollouts_per_prompt=2, sync_every=2))
    assert [entry for entry in log if entry[0] in ("train", "push")] == [
        ("push", 0), ("train", (0, 1)), ("train", (2, 3)), ("push", 2),
        ("train", (4, 5)), ("train", (6, 7)), ("push", 4), ("train", (8, 9)), ("push", 5),
    ]  # fmt: skip
    assert [entry[1] for entry in log if entry[0] == "due?"] == [2, 4, 5]  # commits fall on window ends


def test_sync_every_zero_pushes_only_before_the_first_step() -> None:
    """Also after a resume: the first weights go to the engine before the trained ones are restored."""
    for start in (0, 2):
        _, log = run(Plan(steps=3, prompts_per_step=1, rollouts_per_prompt=2, sync_every=0), start=start)
        assert [entry for entry in log if entry[0] == "push"] == [("push", 0)]
        assert log[:2] == [("push", 0), ("start", start)]


def test_a_step_without_an_update_keeps_the_policy_version() -> None:
    state, log = run(Plan(steps=2, prompts_per_step=1, rollouts_per_prompt=2), updates=False)
    assert (state.step, state.policy_version, state.num_skipped_steps) == (2, 0, 2)
    assert [entry for entry in log if entry[0] == "push"] == [("push", 0)] * 3


def test_a_resumed_run_pushes_first_and_goes_on_at_the_frontier() -> None:
    state, log = run(Plan(steps=4, prompts_per_step=2, rollouts_per_prompt=2), start=3)
    assert log[:3] == [("start", 3), ("push", 3), ("train", (6, 7))]
    assert state.step == 4


def test_a_signal_in_the_last_window_changes_nothing_any_more() -> None:
    state, log = run(Plan(steps=2, prompts_per_step=1, rollouts_per_prompt=2), stop_after=2)
    assert state.step == 2
    assert log[-1] == ("finish", 2)


def test_a_signal_before_the_first_step_ends_the_run_without_an_evaluation() -> None:
    state, log = run(Plan(steps=2, prompts_per_step=1, rollouts_per_prompt=2), stop_after=0)
    assert state.step == 0
    assert log == [("start", 0), ("push", 0), ("commit", 0)]


def test_a_run_that_changes_nothing_any_more_is_given_up_after_a_commit() -> None:
    plan = Plan(steps=9, prompts_per_step=1, rollouts_per_prompt=2, max_skipped_steps=3)
    notes = Notes(plan, updates=False)
    with pytest.raises(StalledError, match="none of the last 3 steps"):
        asyncio.run(train(notes.stages(), plan))
    assert notes.log[-1] == ("commit", 3)


def test_a_signal_ends_the_run_after_a_commit_and_without_a_final_model() -> None:
    state, log = run(Plan(steps=9, prompts_per_step=1, rollouts_per_prompt=2), stop_after=2)
    assert state.step == 2
    assert log[-1] == ("commit", 2)
    assert all(entry[0] != "finish" for entry in log)


def test_the_last_partial_step_of_a_window_trains() -> None:
    async def five():
        for ordinal in range(5):
            yield a_group(ordinal)

    async def sizes() -> list[int]:
        return [len(step) async for step in by_step(five(), 2)]

    assert asyncio.run(sizes()) == [2, 2, 1]
