"""The loop with stages that only note what they are asked: the order of things."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from podium.errors import StalledError
from podium.loop import train
from podium.observer import Observer
from podium.records import Group, Plan, Prompt, Rollout, RunState, StepGroups, UpdateResult
from podium.stages import Stages


def a_group(ordinal: int) -> Group:
    rollout = Rollout((1,), (0.0,), (1,), "stop", "", 0, 0, 0, 0, "")
    return Group(Prompt(ordinal, (1,)), (rollout, rollout), rewards=(0.0, 1.0))


class Notes:
    """Every stage at once. `keeps` is the filter, by ordinal; the data ends at ordinal `num_prompts`."""

    def __init__(
        self,
        plan: Plan,
        *,
        updates: bool = True,
        stop_after: int | None = None,
        start: int = 0,
        keeps: Callable[[int], bool] = lambda ordinal: True,
        num_prompts: int = 10**6,
    ) -> None:
        self.log: list[Any] = []
        self._plan, self._updates, self._stop_after, self._start = plan, updates, stop_after, start
        self._keeps, self._num_prompts = keeps, num_prompts
        self.written: list[StepGroups] = []
        self.steps = start

    def stages(self) -> Stages:
        return Stages(
            data=self,
            rollout=self.start,
            reward=self,
            assign_advantages=list,
            filter=lambda groups: [group for group in groups if self._keeps(group.prompt.ordinal)],
            pack=lambda groups: [("batch", tuple(group.prompt.ordinal for group in groups))],  # type: ignore[return-value]
            train=_Trainer(self).step,
            sync=_Sync(self),
            checkpoint=_Checkpoint(self),
            report=_Report(self),  # type: ignore[arg-type]
            evaluation=_Evaluation(self),
            observer=Observer(stop_requested=lambda: self._stop_after is not None and self.steps >= self._stop_after),
        )

    def draw(self, state: RunState, count: int) -> list[Prompt]:
        end = min(self._num_prompts, state.next_ordinal + count)
        return [Prompt(ordinal, (1,)) for ordinal in range(state.next_ordinal, end)]

    def advance(self, state: RunState, groups: Sequence[Group]) -> RunState:
        return replace(state, next_ordinal=state.next_ordinal + len(groups))

    def end(self, state: RunState) -> str | None:
        raise AssertionError("asked by those around the loop")

    async def start(self, prompts: Sequence[Prompt]) -> AsyncIterator[Group]:
        self.log.append(("sample", tuple(prompt.ordinal for prompt in prompts)))
        for prompt in prompts:
            yield a_group(prompt.ordinal)

    async def score_each(self, groups: AsyncIterator[Group], after: Sequence[Group] = ()) -> AsyncIterator[Group]:
        if after:
            self.log.append(("after", tuple(group.prompt.ordinal for group in after)))
        async for group in groups:
            yield group


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

    async def write(self, state, step, result, seconds) -> None:
        self._notes.log.append(("report", state.step))
        self._notes.written.append(step)


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
        ("sample", (0, 1)), ("train", (0, 1)), ("report", 1), ("push", 1), ("eval?", 0, 1), ("due?", 1, 2),
        ("sample", (2, 3)), ("train", (2, 3)), ("report", 2), ("push", 2), ("eval?", 1, 2), ("due?", 2, 4),
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
    assert log[:4] == [("start", 3), ("push", 3), ("sample", (6, 7)), ("train", (6, 7))]
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
    state, log = run(Plan(steps=4, prompts_per_step=2, rollouts_per_prompt=2, sync_every=3), num_prompts=5)
    assert [entry for entry in log if entry[0] in ("sample", "train")] == [
        ("sample", (0, 1, 2, 3, 4)), ("train", (0, 1)), ("train", (2, 3)), ("train", (4,)),
    ]  # fmt: skip
    assert log[-1] == ("finish", 3)
    assert (state.step, state.next_ordinal) == (3, 5)


def test_without_refill_a_step_is_what_was_drawn_whatever_the_filter_keeps() -> None:
    plan = Plan(steps=2, prompts_per_step=2, rollouts_per_prompt=2, sync_every=2)
    notes = Notes(plan, keeps=lambda ordinal: ordinal % 4 == 0)
    asyncio.run(train(notes.stages(), plan))
    assert [entry[1] for entry in notes.log if entry[0] == "sample"] == [(0, 1, 2, 3)]
    assert [entry[1] for entry in notes.log if entry[0] == "train"] == [(0,), ()]
    assert [step.num_refills for step in notes.written] == [0, 0]


def refilled(keeps: Callable[[int], bool], *, num_prompts: int = 10**6, **plan: int) -> tuple[Notes, RunState]:
    numbers = {"steps": 2, "prompts_per_step": 3, "rollouts_per_prompt": 2, "max_refills": 10} | plan
    notes = Notes(Plan(**numbers), keeps=keeps, num_prompts=num_prompts)
    return notes, asyncio.run(train(notes.stages(), notes._plan))


def events(notes: Notes) -> list[Any]:
    return [entry for entry in notes.log if entry[0] in ("sample", "train", "push")]


def test_a_step_is_refilled_with_exactly_as_many_prompts_as_it_misses_until_it_is_full() -> None:
    notes, state = refilled(lambda ordinal: ordinal % 2 == 0)
    # of 0 1 2 two are kept, 3 is dropped, 4 completes; then 5 6 7 keep one, of 8 9 one, 10 completes
    assert events(notes) == [
        ("push", 0), ("sample", (0, 1, 2)), ("sample", (3,)), ("sample", (4,)), ("train", (0, 2, 4)),
        ("push", 1), ("sample", (5, 6, 7)), ("sample", (8, 9)), ("sample", (10,)), ("train", (6, 8, 10)), ("push", 2),
    ]  # fmt: skip
    assert [step.num_refills for step in notes.written] == [2, 2]
    assert [[group.prompt.ordinal for group in step.drawn] for step in notes.written] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9, 10],
    ]
    assert (state.step, state.next_ordinal, state.num_rollouts) == (2, 11, 22)  # dropped groups count in both


def test_a_full_step_draws_nothing_more() -> None:
    notes, state = refilled(lambda ordinal: True)
    assert [entry[1] for entry in notes.log if entry[0] == "sample"] == [(0, 1, 2), (3, 4, 5)]
    assert state.next_ordinal == 6


def test_refilled_groups_are_scored_after_those_that_the_step_has() -> None:
    notes, _ = refilled(lambda ordinal: ordinal % 2 == 0, steps=1)
    assert [entry[1] for entry in notes.log if entry[0] == "after"] == [(0, 1, 2), (0, 1, 2, 3)]


def test_after_the_last_round_the_step_trains_what_there_is() -> None:
    notes, state = refilled(lambda ordinal: ordinal == 0, steps=1, max_refills=2)
    assert events(notes) == [
        ("push", 0), ("sample", (0, 1, 2)), ("sample", (3, 4)), ("sample", (5, 6)), ("train", (0,)), ("push", 1),
    ]  # fmt: skip
    assert state.next_ordinal == 7


def test_where_nothing_at_all_is_kept_the_step_is_still_one() -> None:
    notes, state = refilled(lambda ordinal: False, steps=1, max_refills=1)
    assert [entry[1] for entry in notes.log if entry[0] == "train"] == [()]
    assert (state.step, state.next_ordinal) == (1, 6)


def test_where_the_data_ends_the_step_trains_what_there_is() -> None:
    notes, state = refilled(lambda ordinal: ordinal != 1, num_prompts=5)
    assert events(notes) == [
        ("push", 0), ("sample", (0, 1, 2)), ("sample", (3,)), ("train", (0, 2, 3)),
        ("push", 1), ("sample", (4,)), ("train", (4,)), ("push", 2),
    ]  # fmt: skip
    assert state.next_ordinal == 5


def test_a_window_starts_at_once_and_is_refilled_with_what_all_its_steps_miss() -> None:
    notes, state = refilled(lambda ordinal: ordinal % 2 == 0, sync_every=2)
    # kept of 0 … 5: 0 2 4, a whole step; three are missing: of 6 7 8 two are kept, 9 is dropped, 10 completes
    assert events(notes) == [
        ("push", 0), ("sample", (0, 1, 2, 3, 4, 5)), ("train", (0, 2, 4)),
        ("sample", (6, 7, 8)), ("sample", (9,)), ("sample", (10,)), ("train", (6, 8, 10)), ("push", 2),
    ]  # fmt: skip
    assert [[group.prompt.ordinal for group in step.drawn] for step in notes.written] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9, 10],
    ]
    assert [step.num_refills for step in notes.written] == [0, 3]
    assert state.next_ordinal == 11
    assert [entry[1:] for entry in notes.log if entry[0] == "due?"] == [(2, 11)]


def test_one_round_may_serve_two_steps_of_a_window_and_counts_for_the_first() -> None:
    notes, _ = refilled(lambda ordinal: ordinal > 4, sync_every=2)
    assert events(notes) == [
        ("push", 0), ("sample", (0, 1, 2, 3, 4, 5)), ("sample", (6, 7, 8, 9, 10)),
        ("train", (5, 6, 7)), ("train", (8, 9, 10)), ("push", 2),
    ]  # fmt: skip
    assert [step.num_refills for step in notes.written] == [1, 0]


def test_a_window_that_could_not_be_filled_has_fewer_steps_and_the_next_goes_on() -> None:
    notes, state = refilled(lambda ordinal: ordinal >= 8, sync_every=2, max_refills=1, steps=3)
    # 0 … 5 and 6 … 11: eight are dropped, 8 … 11 make a full step and one of a single group
    assert events(notes) == [
        ("push", 0), ("sample", (0, 1, 2, 3, 4, 5)), ("sample", (6, 7, 8, 9, 10, 11)),
        ("train", (8, 9, 10)), ("train", (11,)), ("push", 2),
        ("sample", (12, 13, 14)), ("train", (12, 13, 14)), ("push", 3),
    ]  # fmt: skip
    assert state.step == 3
