"""One simulation: the resources, the stages around them, and what is counted."""

import asyncio
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from _simulator.clock import Cores, Interpreter, Shared, play
from _simulator.scenario import CANARY_EVERY_S, CANARY_S, Outcome, Scenario
from _simulator.stages import Checkpoint, Data, Evaluation, Pool, Report, Reward, Sync, Trainer
from _simulator.workers import CoreWorker, DeviceWorker
from podium import loop, loop_async
from podium.observer import Observer
from podium.stages import Stages


def simulate(scenario: Scenario) -> Outcome:
    return play(_simulate(scenario))


async def _simulate(scenario: Scenario) -> Outcome:
    world = World(scenario)
    train = loop_async.train if scenario.plan.max_lag else loop.train
    await train(world.stages(), scenario.plan)
    return world.outcome()


@dataclass
class Tally:
    """What a simulation counts on the way; read at the end of every step."""

    tokens: int = 0
    rollouts: int = 0
    stale: int = 0
    train_s: float = 0.0
    sync_s: float = 0.0
    bytes: float = 0.0
    lags: list[int] = field(default_factory=list)
    stretches: list[float] = field(default_factory=list)
    steps: list[dict[str, float]] = field(default_factory=list)


class World:
    """All that the stages share."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.costs, self.plan = scenario, scenario.costs, scenario.plan
        self.tally = Tally()
        self.cores = None if scenario.cores is None else Cores(scenario.cores, scenario.others)
        self.driver = Interpreter(self.cores, "driver")
        self.link = Shared(lambda users: self.costs.driver_bytes_per_s / users)
        self.workers = [self._worker(number) for number in range(scenario.workers)]
        self.pool = Pool(self)
        self.version = 0
        self._canary = asyncio.ensure_future(self._burst_again_and_again()) if scenario.canary else None

    async def _burst_again_and_again(self) -> None:
        assert self.cores is not None
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await self.cores.use("canary", CANARY_S)
            self.tally.stretches.append((loop.time() - began) / CANARY_S)
            await asyncio.sleep(CANARY_EVERY_S)

    def _worker(self, number: int) -> DeviceWorker | CoreWorker:
        return (
            DeviceWorker(self.costs) if self.cores is None else CoreWorker(self.costs, self.cores, f"worker {number}")
        )

    def stages(self) -> Stages:
        return Stages(
            data=Data(),
            rollout=self.pool.start,
            reward=Reward(self),
            assign_advantages=list,
            filter=list,
            pack=list,  # type: ignore[arg-type]
            train=Trainer(self).step,
            sync=Sync(self),
            checkpoint=Checkpoint(),  # type: ignore[arg-type]
            report=Report(self),
            evaluation=Evaluation(),
            observer=Observer(event=self._note),
        )

    def _note(self, kind: str, **details: Any) -> None:
        self.tally.stale += kind == "stale"

    def outcome(self) -> Outcome:
        counted = self.tally.steps[self.scenario.warm_up - 1 : len(self.tally.steps) - self.plan.max_lag]
        first, last, steps = counted[0], counted[-1], len(counted) - 1  # the last ones have nothing ahead any more
        over = {name: last[name] - first[name] for name in last}
        seconds = over["now"]
        lags = self.tally.lags[int(first["trained"]) : int(last["trained"])]
        return Outcome(
            steps=steps,
            step_s=seconds / steps,
            rollouts_per_s=over["rollouts"] / seconds,
            tokens_per_s=over["tokens"] / seconds,
            worker_busy=over["busy"] / seconds / len(self.workers),
            slots_busy=over["slots"] / seconds / len(self.workers) / self.scenario.concurrency,
            trainer_busy=over["train"] / seconds,
            driver_busy=over["driver"] / seconds,
            sync_share=over["sync"] / seconds,
            lag_mean=sum(lags) / len(lags),
            lag_max=max(lags),
            stale=int(over["stale"]),
            driver_mb_per_s=over["bytes"] / seconds / 1e6,
            canary_stretch=fmean(self.tally.stretches or [1.0]),
        )

    def end_step(self) -> None:
        tally = self.tally
        tally.steps.append(
            {
                "now": asyncio.get_running_loop().time(),
                "rollouts": tally.rollouts,
                "tokens": tally.tokens,
                "trained": len(tally.lags),
                "stale": tally.stale,
                "train": tally.train_s,
                "sync": tally.sync_s,
                "bytes": tally.bytes,
                "driver": self.driver.busy_s,
                "busy": sum(worker.busy_s for worker in self.workers),
                "slots": sum(worker.slot_s for worker in self.workers),
            }
        )
