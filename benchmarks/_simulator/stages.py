"""The stages that the loops are handed; they take time and give what the loops look at."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from _simulator.clock import Shared
from _simulator.scenario import TREE_WIDTH
from podium.records import Group, Prompt, Rollout, RunState, StepGroups, UpdateResult

if TYPE_CHECKING:
    from _simulator.world import World


class Data:
    """Prompts without end; what is under way or pending is known by its ordinal."""

    def draw(self, state: RunState, count: int, under_way: Collection[int] = ()) -> list[Prompt]:
        pending = [ordinal for ordinal in state.pending if ordinal not in under_way]
        drawn, ordinal = pending[:count], state.next_ordinal
        while len(drawn) < count:
            drawn += [ordinal] if ordinal not in under_way else []
            ordinal += 1
        return [Prompt(ordinal, ()) for ordinal in drawn]

    def advance(self, state: RunState, groups: Sequence[Group], under_way: Collection[int] = ()) -> RunState:
        done = {group.prompt.ordinal for group in groups}
        frontier = max((state.next_ordinal - 1, *done, *under_way)) + 1
        return replace(state, next_ordinal=frontier, pending=tuple(sorted({*state.pending, *under_way} - done)))

    def end(self, state: RunState) -> str | None:
        return None


class Pool:
    """The rollout stage and its engine: parcels go to the worker with the fewest rollouts in flight, or wait."""

    def __init__(self, world: World) -> None:
        self._world, self._scenario, self._costs = world, world.scenario, world.costs
        self._loads = [0] * world.scenario.workers
        self._by_load = [(0, number) for number in range(world.scenario.workers)]
        """A heap; an entry whose load is no longer the worker's is skipped."""
        self._waiting: deque[tuple[int, asyncio.Future[int]]] = deque()

    async def start(self, prompts: Sequence[Prompt]) -> AsyncIterator[Group]:
        arrived: asyncio.Queue[Group] = asyncio.Queue()
        size = self._scenario.prompts_per_request
        parcels = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        tasks = [asyncio.create_task(self._deliver(parcel, arrived)) for parcel in parcels]
        order, held = deque(prompt.ordinal for prompt in prompts), {}
        try:
            for _ in prompts:
                group = await arrived.get()
                if not self._scenario.in_order:
                    yield group
                    continue
                held[group.prompt.ordinal] = group
                while order and order[0] in held:
                    yield held.pop(order.popleft())
        finally:
            for task in tasks:
                task.cancel()

    async def _deliver(self, parcel: Sequence[Prompt], arrived: asyncio.Queue[Group]) -> None:
        costs, tally = self._costs, self._world.tally
        groups = [self._scenario.lengths.of(prompt.ordinal, self._world.plan.rollouts_per_prompt) for prompt in parcel]
        rollouts = sum(map(len, groups))
        worker = await self._acquire(rollouts)
        try:
            await self._world.driver.use(costs.send_s + costs.route_s * len(self._loads))
            version = self._world.version
            async for place in self._world.workers[worker].write(groups):
                tokens = sum(groups[place])
                if costs.token_bytes:
                    tally.bytes += costs.token_bytes * tokens
                    await self._world.link.use(costs.token_bytes * tokens)
                await self._world.driver.use(
                    costs.receive_rollout_s * len(groups[place]) + costs.receive_token_s * tokens
                )
                arrived.put_nowait(_group(parcel[place], groups[place], version, self._world.version))
        finally:
            self._loads[worker] -= rollouts
            heapq.heappush(self._by_load, (self._loads[worker], worker))
            self._hand_out()

    async def _acquire(self, rollouts: int) -> int:
        place: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((rollouts, place))
        self._hand_out()
        return await place

    def _hand_out(self) -> None:
        """A parcel larger than a worker's limit goes to one that has nothing else to do."""
        while self._waiting:
            while self._by_load and self._loads[self._by_load[0][1]] != self._by_load[0][0]:
                heapq.heappop(self._by_load)
            rollouts, place = self._waiting[0]
            load, worker = self._by_load[0]
            if load and load + rollouts > self._scenario.concurrency:
                return
            self._waiting.popleft()
            if not place.done():
                self._loads[worker] += rollouts
                heapq.heapreplace(self._by_load, (self._loads[worker], worker))
                place.set_result(worker)


def _group(prompt: Prompt, lengths: Sequence[int], first: int, last: int) -> Group:
    """One rollout stands for all: what counts here is its versions and how many tokens there are."""
    rollout = Rollout((), (), (), "stop", "", first, last, 0, 0, "")
    return Group(replace(prompt, metadata={"lengths": lengths}), (rollout,))


def _lengths(groups: Sequence[Group]) -> Iterator[int]:
    return (length for group in groups for length in group.prompt.metadata["lengths"])


class Reward:
    def __init__(self, world: World) -> None:
        self._score_s = world.costs.score_s

    async def score_each(self, groups: AsyncIterator[Group], after: Sequence[Group] = ()) -> AsyncIterator[Group]:
        pending: deque[asyncio.Task[Group]] = deque()
        async for group in groups:
            if not self._score_s:
                yield group
                continue
            pending.append(asyncio.create_task(asyncio.sleep(self._score_s, group)))
            while pending and pending[0].done():
                yield pending.popleft().result()
        while pending:
            yield await pending.popleft()

    def close(self) -> None: ...


class Trainer:
    def __init__(self, world: World) -> None:
        self._world, self._costs, self._version = world, world.costs, 0

    async def step(self, groups: Sequence[Group]) -> UpdateResult:
        world, costs, ranks = self._world, self._costs, self._world.scenario.ranks
        answers = list(_lengths(groups))
        tokens = sum(answers) + len(answers) * world.scenario.prompt_tokens
        world.tally.lags += [self._version - group.oldest_version for group in groups]
        self._version += 1
        world.tally.rollouts += len(answers)
        world.tally.tokens += sum(answers)
        await world.driver.use(costs.pack_token_s * tokens + costs.order_token_s * tokens * (ranks - 1) / ranks)
        seconds = costs.train_step_s + costs.train_token_s * max(tokens / ranks, max(answers))
        seconds += 2 * (ranks - 1) / ranks * costs.weight_bytes / costs.link_bytes_per_s
        began = asyncio.get_running_loop().time()
        await (world.driver.use(seconds) if costs.trainer_in_driver else asyncio.sleep(seconds))
        world.tally.train_s += asyncio.get_running_loop().time() - began
        return UpdateResult(updated=True, num_loss_tokens=tokens, metrics={})


class Sync:
    def __init__(self, world: World) -> None:
        self._world, self._held = world, -1

    async def push(self, version: int) -> None:
        if version == self._held:
            return
        world, costs = self._world, self._world.costs
        began = asyncio.get_running_loop().time()
        await world.driver.use(costs.publish_s)
        await asyncio.sleep(costs.sync_wait_s)
        if world.scenario.fan_out == "tree":
            await self._hand_on()
        else:
            storage = Shared(lambda users: costs.storage_bytes_per_s / users)
            await asyncio.gather(*(self._read(worker, storage) for worker in world.workers))
        self._held = world.version = version
        world.tally.sync_s += asyncio.get_running_loop().time() - began

    async def _read(self, worker: Any, storage: Shared) -> None:
        world, costs = self._world, self._world.costs
        await world.driver.use(costs.push_worker_s)
        if costs.weight_bytes:
            await storage.use(costs.weight_bytes)
        await worker.work(costs.load_s)

    async def _hand_on(self) -> None:
        """Level by level; the first is the driver's, and all workers of a level work at the same time."""
        world, costs = self._world, self._world.costs
        level, reached = min(TREE_WIDTH, len(world.workers)), 0
        while reached < len(world.workers):
            told = costs.push_worker_s * min(TREE_WIDTH, level)
            await (asyncio.sleep(told) if reached else world.driver.use(told))
            await asyncio.sleep(costs.weight_bytes / costs.link_bytes_per_s + costs.load_s)
            reached, level = reached + level, level * TREE_WIDTH

    def close(self) -> None: ...


class Report:
    def __init__(self, world: World) -> None:
        self._world = world

    async def start(self, state: RunState) -> None: ...

    async def write(self, state: RunState, step: StepGroups, result: UpdateResult, seconds: Any) -> None:
        costs, answers = self._world.costs, list(_lengths(step.drawn))
        work = costs.report_step_s + costs.report_rollout_s * len(answers) + costs.report_token_s * sum(answers)
        await self._world.driver.use(work)
        self._world.end_step()


class Evaluation:
    async def run_if_due(self, state: RunState, since: int) -> None: ...


class Checkpoint:
    """Commits are written beside the training and are left out."""

    async def restore_or_start(self) -> RunState:
        return RunState()

    async def commit_if_due(self, state: RunState) -> None: ...

    async def commit(self, state: RunState) -> None: ...

    async def finish(self, state: RunState) -> None: ...
