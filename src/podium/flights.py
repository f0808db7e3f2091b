"""The prompts that the async loop has under way: being written, being scored, or waiting for their step.

A flight is a set of prompts that were sent together. Its groups join the waiting groups in the order in which their
rewards are known. If the engine keeps order and the rewards run inline, this is the order of the ordinals, so two runs
with the same seed are equal; otherwise it is the order of completion. With `filter.refill`, a group that the filter
drops does not count for its step, and another prompt is sent in its place.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from podium.records import Group, Plan, Prompt, Queues, RunState, StepGroups
from podium.stages import Stages

POLL_S = 0.5
"""Longest wait before checking again whether the run should stop."""


class Flights:
    """Leaving the context cancels all flights; a resumed run draws their prompts again."""

    def __init__(self, stages: Stages, plan: Plan) -> None:
        self._stages, self._plan, self._observer = stages, plan, stages.observer
        self._under_way: set[int] = set()
        self._sent: dict[int, Prompt] = {}
        """The prompts under way as they were drawn; in a group, an environment may have added its first messages."""
        """Ordinals."""
        self._uncounted: set[int] = set()
        """Ordinals under way that do not count for their step."""
        self._flying: set[asyncio.Task[None]] = set()
        self._waiting: deque[tuple[Group, list[Group]]] = deque()
        """Groups with their advantages, each with what the filter kept of the group."""
        self._recent: deque[Group] = deque(maxlen=plan.prompts_per_step)
        self._again: list[Prompt] = []
        """Prompts whose groups were too old."""
        self._num_stale = 0
        self._state: RunState | None = None
        """The state at the last `send`, while the engine holds the trainer's weights; else None."""
        self._news = asyncio.Event()

    async def __aenter__(self) -> "Flights":
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._cancel()

    @property
    def under_way(self) -> set[int]:
        """Ordinals that were sent and are not trained yet."""
        return set(self._under_way)

    def send(self, state: RunState) -> None:
        """Sends the prompts of groups that were too old, and as many new ones as there is room for."""
        self._state = state
        drawn = self._stages.data.draw(state, self._room(state), self._under_way)
        prompts, self._again = [*self._again, *drawn], []
        if prompts:
            self._under_way |= {prompt.ordinal for prompt in prompts}
            self._sent |= {prompt.ordinal: prompt for prompt in prompts}
            self._uncounted -= {prompt.ordinal for prompt in prompts}
            groups = self._observer.writing(self._stages.rollout(prompts), prompts)
            task = asyncio.create_task(self._fly(groups, len(prompts)))
            self._flying.add(task)
            task.add_done_callback(lambda _: self._news.set())

    def _room(self, state: RunState) -> int:
        """How many prompts may be sent now. The number under way is bounded, however many groups are dropped."""
        plan = self._plan
        wanted = min(plan.prompts_ahead, (plan.steps - state.step) * plan.prompts_per_step)
        most = wanted * (1 + plan.max_refills)
        counted = len(self._under_way) - len(self._uncounted)
        return max(0, min(wanted - counted, most - len(self._under_way)))

    async def _fly(self, groups: AsyncIterator[Group], count: int) -> None:
        """Stages 2 to 4 for `count` prompts. If they do not fill whole steps, the recent groups count in the share of
        failed rewards too: a few groups alone would say little."""
        stages, is_whole = self._stages, count % self._plan.prompts_per_step == 0
        after = () if is_whole else tuple(self._recent)
        async for group in self._observer.scored(stages.reward.score_each(self._noticed(groups), after=after)):
            [credited] = stages.assign_advantages([group])
            kept = stages.filter([credited])
            if self._plan.max_refills and not kept:
                self._uncounted.add(group.prompt.ordinal)
            self._recent.append(credited)
            self._waiting.append((credited, kept))
            self._news.set()
        if self._state is not None and not self._observer.stop_requested():
            self.send(self._state)

    async def _noticed(self, groups: AsyncIterator[Group]) -> AsyncIterator[Group]:
        async for group in groups:
            self._news.set()
            yield group

    async def next_step(self, state: RunState) -> StepGroups:
        """The groups of a step in the order of their arrival; fewer if the data ends or a signal arrives."""
        step = StepGroups(self._plan.prompts_per_step)
        while True:
            self._look_after_flights()
            while self._waiting and not self._is_full(step):
                group, kept = self._waiting.popleft()
                if state.policy_version - group.oldest_version > self._plan.max_lag:
                    self._reject(group, state)
                else:
                    step = step.plus([group], kept)
            if self._is_full(step) or self._observer.stop_requested():
                break
            self.send(state)
            if not self._flying:
                break
            await self._wait()
        observer = self._observer
        queues = Queues(observer.num_writing, len(observer.unscored), len(self._waiting), self._num_stale)
        self._num_stale = 0
        return replace(step, queues=queues)

    def _is_full(self, step: StepGroups) -> bool:
        """With refills, a step is full when enough groups are kept, or when all rounds of refilling are used up."""
        plan = self._plan
        enough = len(step.kept if plan.max_refills else step.drawn) == plan.prompts_per_step
        return enough or len(step.drawn) == plan.prompts_per_step * (1 + plan.max_refills)

    def _reject(self, group: Group, state: RunState) -> None:
        """The group is too old to be trained: its prompt is sampled again under the same ordinal."""
        self._again.append(self._sent[group.prompt.ordinal])
        self._num_stale += 1
        versions = {"oldest": group.oldest_version, "policy_version": state.policy_version}
        self._observer.event("stale", ordinal=group.prompt.ordinal, **versions)

    def end(self, step: StepGroups) -> None:
        """The step is trained: its groups are no longer under way, and the engine is behind until the next `send`."""
        done = {group.prompt.ordinal for group in step.drawn}
        self._under_way -= done
        self._sent = {ordinal: prompt for ordinal, prompt in self._sent.items() if ordinal not in done}
        self._uncounted -= done
        self._state = None

    async def written(self) -> None:
        """Waits until nothing is being generated; groups may still be scored. After a signal, cancels all flights."""
        while self._observer.num_writing and not self._observer.stop_requested():
            self._look_after_flights()
            await self._wait()
        if self._observer.stop_requested():
            await self._cancel()

    async def _cancel(self) -> None:
        flying, self._flying = self._flying, set()
        for task in flying:
            task.cancel()
        await asyncio.gather(*flying, return_exceptions=True)

    async def _wait(self) -> None:
        """Waits for a group, for the end of a flight, or for `POLL_S`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), POLL_S)
        self._news.clear()

    def _look_after_flights(self) -> None:
        """Raises the error of a failed flight."""
        landed = {task for task in self._flying if task.done()}
        self._flying -= landed
        for task in landed:
            task.result()
