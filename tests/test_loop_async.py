"""The async loop with stages that take a random number of turns: order, age, bounds, and what a killed run leaves."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium import loop, loop_async
from podium.data.build import OrderedData
from podium.errors import EngineError, StalledError
from podium.observer import Observer
from podium.records import Group, Plan, Prompt, RunState, StepGroups, UpdateResult
from podium.stages import Stages
from tests.builders import make_group, make_rollout
from tests.data.test_order import make_data


@dataclass
class Disk:
    """What survives a kill: the last commit, and the steps that were reported until then."""

    state: RunState = field(default_factory=RunState)
    steps: list[StepGroups] = field(default_factory=list)
    committed: int = 0
    """Steps that the commit covers."""


class World:
    """Every stage at once. Writing a group, scoring it, training and pushing take random numbers of turns.

    `slow` ordinals take long to score, once. The trainer and the channel complain when they are used at the same time.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        seed: int = 0,
        rows: int = 1000,
        disk: Disk | None = None,
        slow: tuple[int, ...] = (),
        slow_turns: int = 200,
        drop_share: float = 0.0,
        updates: bool = True,
        stop_after: int | None = None,
        breaks_at: int | None = None,
        jitter: int = 6,
        train_turns: int | None = None,
    ) -> None:
        self.plan, self.disk = plan, disk or Disk()
        self.log: list[Any] = []
        self.data: OrderedData = make_data(rows, limit=9, **_numbers(plan))
        self._random, self._slow, self._slow_turns = random.Random(seed), set(slow), slow_turns
        self._drop_share, self._updates = drop_share, updates
        self._stop_after, self._breaks_at, self._jitter = stop_after, breaks_at, jitter
        self._train_turns = train_turns
        self.engine_version = -1
        self.version = self.disk.state.policy_version
        self.writing: set[int] = set()
        self._is_training = self._is_pushing = False

    def stages(self) -> Stages:
        return Stages(
            data=self.data,
            rollout=_Rollout(self).start,
            reward=_Reward(self),  # type: ignore[arg-type]
            assign_advantages=list,
            filter=self.filter,
            pack=list,  # type: ignore[arg-type]
            train=_Trainer(self).step,
            sync=_Sync(self),
            checkpoint=_Checkpoint(self),
            report=_Report(self),  # type: ignore[arg-type]
            evaluation=_Evaluation(self),
            observer=Observer(event=self._note, stop_requested=self._is_stopped),
        )

    def _is_stopped(self) -> bool:
        return self._stop_after is not None and len(self.disk.steps) >= self._stop_after

    def _note(self, kind: str, **details: Any) -> None:
        if kind == "stale":
            self.log.append((kind, details))

    def filter(self, groups: Sequence[Group]) -> list[Group]:
        return [group for group in groups if random.Random(group.prompt.ordinal).random() >= self._drop_share]

    async def turns(self, count: int | None = None) -> None:
        for _ in range(self._random.randrange(self._jitter) if count is None else count):
            await asyncio.sleep(0)


class _Rollout:
    def __init__(self, world: World) -> None:
        self._world = world

    async def start(self, prompts: Sequence[Prompt]) -> AsyncIterator[Group]:
        """In the order of completion."""
        self._world.log.append(("sample", tuple(prompt.ordinal for prompt in prompts)))
        tasks = [asyncio.create_task(self._write(prompt)) for prompt in prompts]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for task in tasks:
                task.cancel()

    async def _write(self, prompt: Prompt) -> Group:
        world = self._world
        first = world.engine_version
        world.writing.add(prompt.ordinal)
        try:
            await world.turns(1 + world._random.randrange(world._jitter))
            if prompt.ordinal == world._breaks_at:
                raise EngineError("gone")
        finally:
            world.writing.discard(prompt.ordinal)
        rollout = make_rollout(policy_version_min=first, policy_version_max=world.engine_version)
        return make_group(prompt=prompt, rollouts=(rollout, rollout))


class _Reward:
    def __init__(self, world: World) -> None:
        self._world = world

    async def score_each(self, groups: AsyncIterator[Group], after: Sequence[Group] = ()) -> AsyncIterator[Group]:
        pending: list[asyncio.Task[Group]] = []
        async for group in groups:
            pending.append(asyncio.create_task(self._score(group)))
            while pending and pending[0].done():
                yield pending.pop(0).result()
        for task in asyncio.as_completed(pending):
            yield await task

    async def _score(self, group: Group) -> Group:
        is_slow = group.prompt.ordinal in self._world._slow
        self._world._slow.discard(group.prompt.ordinal)
        await self._world.turns(self._world._slow_turns if is_slow else None)
        return group


class _Trainer:
    def __init__(self, world: World) -> None:
        self._world = world

    async def step(self, groups: list[Group]) -> UpdateResult:
        world = self._world
        assert not world._is_pushing, "weights are read while a step changes them"
        world._is_training = True
        for group in groups:
            assert 0 <= world.version - group.oldest_version <= world.plan.max_lag
        world.log.append(("training", tuple(group.prompt.ordinal for group in groups)))
        await world.turns(world._train_turns)
        world.log.append(("trained",))
        world.version += world._updates
        world._is_training = False
        return UpdateResult(world._updates, 4, {})


class _Sync:
    def __init__(self, world: World) -> None:
        self._world = world

    async def push(self, version: int) -> None:
        world = self._world
        assert not world._is_training, "weights are read while a step changes them"
        assert version == world.version
        if world.engine_version == version:
            return
        if not world.plan.in_flight:
            assert not world.writing, "weights change under rollouts that are being written"
        world._is_pushing = True
        await world.turns()
        world._is_pushing = False
        assert world.plan.in_flight or not world.writing
        world.engine_version = version
        world.log.append(("push", version))


class _Checkpoint:
    def __init__(self, world: World) -> None:
        self._world = world

    async def restore_or_start(self) -> RunState:
        disk = self._world.disk
        del disk.steps[disk.committed :]
        return disk.state

    async def commit_if_due(self, state: RunState) -> None:
        if state.step % 2 == 0:
            await self.commit(state)

    async def commit(self, state: RunState) -> None:
        self._world.log.append(("commit", state.step))
        self._world.disk.state, self._world.disk.committed = state, len(self._world.disk.steps)

    async def finish(self, state: RunState) -> None:
        await self.commit(state)
        self._world.log.append(("finish", state.step))


class _Report:
    def __init__(self, world: World) -> None:
        self._world = world

    async def start(self, state: RunState) -> None:
        pass

    async def write(self, state: RunState, step: StepGroups, result: UpdateResult, seconds: Any) -> None:
        assert seconds["engine"] >= seconds["overlapped"] >= 0
        self._world.disk.steps.append(step)


class _Evaluation:
    def __init__(self, world: World) -> None:
        self._world = world

    async def run_if_due(self, state: RunState, since: int) -> None:
        assert self._world.engine_version == state.policy_version
        self._world.log.append(("eval?", since, state.step))


def _numbers(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in Plan.__dataclass_fields__}


def a_plan(**numbers: Any) -> Plan:
    return Plan(**{"steps": 4, "prompts_per_step": 2, "rollouts_per_prompt": 2, "max_lag": 1} | numbers)


def run(world: World) -> RunState:
    return asyncio.run(loop_async.train(world.stages(), world.plan))


def drawn(world: World) -> list[list[int]]:
    return [[group.prompt.ordinal for group in step.drawn] for step in world.disk.steps]


def all_drawn(world: World) -> list[int]:
    return [ordinal for ordinals in drawn(world) for ordinal in ordinals]


def events(world: World, *kinds: str) -> list[Any]:
    return [entry for entry in world.log if entry[0] in kinds]


# ── one run, by hand ────────────────────────────────────────────────────────────────────────────────────────────────


def test_with_max_lag_1_the_next_step_is_written_while_one_trains() -> None:
    world = World(a_plan(steps=3), jitter=1, train_turns=9)
    state = run(world)
    # two steps' worth go out first; each step that is trained and pushed makes room for the one after the next
    assert events(world, "sample", "training", "trained", "push", "eval?", "commit", "finish") == [
        ("push", 0), ("eval?", 0, 0), ("sample", (0, 1, 2, 3)), ("training", (0, 1)), ("trained",),
        ("push", 1), ("eval?", 0, 1), ("training", (2, 3)), ("sample", (4, 5)), ("trained",),
        ("push", 2), ("eval?", 1, 2), ("commit", 2), ("training", (4, 5)), ("trained",),
        ("push", 3), ("eval?", 2, 3), ("commit", 3), ("finish", 3),
    ]  # fmt: skip
    assert state == RunState(step=3, policy_version=3, next_ordinal=6, num_rollouts=12, num_tokens=12)


def test_nothing_is_sent_while_an_evaluation_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that cannot write for two at the same time at full speed serves the evaluation alone."""

    async def evaluate(self: _Evaluation, state: RunState, since: int) -> None:
        before = len(events(self._world, "sample"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(events(self._world, "sample")) == before
        self._world.log.append(("eval?", since, state.step))

    monkeypatch.setattr(_Evaluation, "run_if_due", evaluate)
    world = World(a_plan(steps=5), jitter=1, train_turns=3)
    run(world)
    assert len(events(world, "eval?")) == 6
    assert len(events(world, "sample")) > 2


def test_a_step_waits_in_the_commit_for_what_was_sent_before_it_and_came_later() -> None:
    world = World(a_plan(steps=6), slow=(1,), slow_turns=60, jitter=1, train_turns=5)
    run(world)
    assert drawn(world)[:2] == [[0, 2], [3, 4]]  # ordinal 1 is still being scored
    assert sorted(all_drawn(world)) == list(range(12))


def test_a_group_that_others_overtook_for_too_long_is_sampled_again_under_its_own_ordinal() -> None:
    world = World(a_plan(steps=8), slow=(1,), jitter=1, train_turns=5, slow_turns=100)
    run(world)
    [(_, stale)] = events(world, "stale")
    assert stale["ordinal"] == 1
    assert stale["policy_version"] - stale["oldest"] > 1
    assert [entry[1] for entry in events(world, "sample") if 1 in entry[1]] == [(0, 1, 2, 3), (1,)]
    assert sum(step.queues.num_stale for step in world.disk.steps if step.queues) == 1
    assert sorted(all_drawn(world)) == list(range(16))


def test_a_step_that_changes_nothing_makes_no_group_older() -> None:
    world = World(a_plan(steps=8), slow=(1,), slow_turns=100, jitter=1, train_turns=5, updates=False)
    assert run(world).policy_version == 0
    assert events(world, "stale") == []


def test_rollouts_may_span_versions_in_flight_only() -> None:
    def spans(in_flight: bool) -> int:
        world = World(a_plan(steps=30, in_flight=in_flight), seed=3, jitter=12, train_turns=2)
        run(world)
        rollouts = [r for step in world.disk.steps for group in step.drawn for r in group.rollouts]
        return sum(rollout.policy_version_min < rollout.policy_version_max for rollout in rollouts)

    assert spans(False) == 0
    assert spans(True) > 0


def test_with_refills_a_step_has_as_many_kept_groups_as_it_should() -> None:
    world = World(a_plan(steps=6, prompts_per_step=3, max_refills=10), drop_share=0.5)
    state = run(world)
    assert [len(step.kept) for step in world.disk.steps] == [3] * 6
    assert {len(step.drawn) for step in world.disk.steps} != {3}
    done = sorted(all_drawn(world))
    assert sorted({*done, *state.pending}) == list(range(state.next_ordinal))
    assert not {*done} & {*state.pending}


def test_where_all_is_dropped_steps_end_all_the_same_and_the_run_is_given_up() -> None:
    world = World(a_plan(steps=9, max_refills=2, max_skipped_steps=3), drop_share=1.0, updates=False)
    with pytest.raises(StalledError, match="none of the last 3 steps"):
        run(world)
    assert [len(step.drawn) for step in world.disk.steps] == [6, 6, 6]  # two prompts and two rounds of two
    assert world.log[-1] == ("commit", 3)


def test_however_many_are_dropped_what_is_under_way_has_a_bound() -> None:
    world = World(a_plan(steps=2, max_refills=2), drop_share=1.0, train_turns=500)
    run(world)
    trained = [index for index, entry in enumerate(world.log) if entry[0] == "trained"]
    sent = [ordinal for entry in world.log[: trained[0]] if entry[0] == "sample" for ordinal in entry[1]]
    assert len(sent) == 12  # two steps' worth of two, thrice


def test_where_the_data_ends_the_last_step_trains_what_there_is() -> None:
    world = World(a_plan(steps=9, epochs=1), rows=7)
    state = run(world)
    assert [len(ordinals) for ordinals in drawn(world)] == [2, 2, 2, 1]
    assert (state.step, state.next_ordinal, state.pending) == (4, 7, ())
    assert world.log[-1] == ("finish", 4)


def test_what_breaks_a_flight_breaks_the_run() -> None:
    with pytest.raises(EngineError, match="gone"):
        run(World(a_plan(steps=9), breaks_at=5))


@pytest.mark.parametrize("stop_after", [0, 1, 3])
def test_a_signal_commits_and_drops_what_is_under_way_which_a_resume_draws_again(stop_after: int) -> None:
    world = World(a_plan(steps=6), stop_after=stop_after, slow=(1,), slow_turns=10**6)
    state = run(world)
    assert state.step == stop_after
    assert world.log[-1] == ("commit", stop_after)
    again = World(world.plan, disk=world.disk)
    assert run(again).step == 6
    assert sorted(all_drawn(again)) == list(range(12))


def test_a_signal_is_heard_while_no_group_comes() -> None:
    world = World(a_plan(), stop_after=0, slow=(0, 1, 2, 3), slow_turns=10**9)
    assert run(world).step == 0
    assert world.log[-1] == ("commit", 0)


def test_a_signal_in_the_last_step_changes_nothing_any_more() -> None:
    for plan, rows in ((a_plan(), 1000), (a_plan(steps=9, epochs=1), 8)):  # four steps by either
        world = World(plan, rows=rows, stop_after=4)
        assert run(world).step == 4
        assert world.log[-1] == ("finish", 4)


def test_the_strict_loop_goes_on_with_what_the_async_one_left_pending() -> None:
    world = World(a_plan(steps=6, max_lag=3), stop_after=3, slow=(1,), slow_turns=10**6)
    pending = run(world).pending
    assert pending[0] == 1
    assert len(pending) > 2  # more than the first step takes
    strict = replace(world.plan, max_lag=0)
    again = World(strict, disk=world.disk, jitter=1)
    asyncio.run(loop.train(again.stages(), strict))
    assert sorted(all_drawn(again)) == list(range(12))


# ── whatever the order ──────────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def schedules(draw: Any) -> dict[str, Any]:
    plan = a_plan(
        steps=draw(st.integers(1, 9)),
        prompts_per_step=draw(st.integers(1, 4)),
        max_lag=draw(st.integers(1, 3)),
        in_flight=draw(st.booleans()),
        max_refills=draw(st.sampled_from([0, 0, 2])),
        epochs=draw(st.sampled_from([None, 1, 2])),
    )
    return {
        "plan": plan,
        "seed": draw(st.integers(0, 2**32)),
        "rows": draw(st.integers(1, 30)),
        "slow": tuple(draw(st.lists(st.integers(0, 20), max_size=3))),
        "slow_turns": draw(st.integers(1, 80)),
        "drop_share": draw(st.sampled_from([0.0, 0.4])),
        "jitter": draw(st.integers(1, 20)),
    }


def check_ledger(world: World, state: RunState) -> None:
    """No ordinal twice, none lost: every one below the frontier was trained or dropped, or is pending."""
    done = all_drawn(world)
    assert len(set(done)) == len(done)
    assert not set(done) & set(state.pending)
    assert sorted({*done, *state.pending}) == list(range(state.next_ordinal))
    assert len(world.disk.steps) == state.step


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_nothing_is_trained_too_old_or_twice_and_nothing_is_lost(schedule: dict[str, Any]) -> None:
    """The trainer and the channel complain of age and of being used at the same time."""
    world = World(**schedule)
    plan, state = world.plan, run(world)
    check_ledger(world, state)
    assert world.data.end(state) is not None
    if not plan.max_refills:
        assert [len(ordinals) for ordinals in drawn(world)[:-1]] == [plan.prompts_per_step] * (state.step - 1)
    pushed = [version for _, version in events(world, "push")]
    assert pushed == sorted(pushed) == list(range(state.policy_version + 1))


@settings(max_examples=150, deadline=None)
@given(schedules(), st.lists(st.integers(1, 120), min_size=1, max_size=4))
def test_a_run_that_is_killed_at_any_turn_and_resumed_loses_and_repeats_nothing(
    schedule: dict[str, Any], kills: list[int]
) -> None:
    disk, versions = Disk(), [0]

    async def killed(world: World, after_turns: int) -> None:
        task = asyncio.create_task(loop_async.train(world.stages(), world.plan))
        await world.turns(after_turns)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for turns in kills:
        asyncio.run(killed(World(**schedule, disk=disk), turns))
        versions.append(disk.state.policy_version)
        check_committed(disk)
    world = World(**schedule, disk=disk)
    state = run(world)
    check_ledger(world, state)
    assert versions == sorted(versions)


def check_committed(disk: Disk) -> None:
    done = [group.prompt.ordinal for step in disk.steps[: disk.committed] for group in step.drawn]
    assert sorted({*done, *disk.state.pending}) == list(range(disk.state.next_ordinal))
    assert len(done) + len(disk.state.pending) == disk.state.next_ordinal


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_groups_that_come_in_the_order_in_which_they_were_sent_are_never_too_old(schedule: dict[str, Any]) -> None:
    world = World(**schedule | {"jitter": 1, "slow": ()})
    run(world)
    assert events(world, "stale") == []


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_no_more_is_under_way_than_max_lag_steps_and_the_one_that_trains(schedule: dict[str, Any]) -> None:
    world = World(**schedule)
    run(world)
    sent: set[int] = set()
    done = iter(world.disk.steps)
    plan, ended = world.plan, set()
    for entry in world.log:
        if entry[0] == "sample":
            sent |= set(entry[1])
            under_way = sent - ended
            dropped = {o for o in under_way if random.Random(o).random() < schedule["drop_share"]}
            assert len(under_way - dropped if plan.max_refills else under_way) <= plan.prompts_ahead
            assert len(under_way) <= plan.prompts_ahead * (1 + plan.max_refills)
        if entry[0] == "trained":
            ended |= {group.prompt.ordinal for group in next(done).drawn}
