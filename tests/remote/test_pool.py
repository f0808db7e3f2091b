"""A pool of workers that are neither engines nor rewards. Its rules with engines: tests/engine/test_pool_rules.py."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from podium.errors import InputError, WorkerError
from podium.remote.pool import Limit, Member, Pool, RetriesError, Rules

RULES = Rules((2, 2), 1, max_restarts=1, start_s=5.0, recovery_s=5.0, frozen_s=5.0, max_redispatches=2)


class Adder:
    """Adds a number that it is given when it is prepared."""

    pid: int | None = None

    def __init__(self, name: str) -> None:
        self.name, self.has_ended = name, False
        self.number: int | None = None
        self.fails = False
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def add(self, other: int) -> int:
        if self.fails:
            raise WorkerError("cannot add")
        await asyncio.sleep(0)
        assert self.number is not None
        return self.number + other

    async def ping(self) -> None:
        pass

    async def exited(self) -> str:
        return await asyncio.shield(self.death)

    async def end(self) -> None:
        self.has_ended = True


class Adders:
    """A pool of them, with its events."""

    def __init__(self, prepare: Callable[[Member[Adder]], Awaitable[Mapping[str, Any]]] | None = None) -> None:
        self.workers: list[Adder] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.pool: Pool[Member[Adder]] = Pool(
            RULES,
            lambda name, worker: Member(name, worker, Limit(4)),
            prepare or self._prepare,
            lambda kind, **details: self.events.append((kind, details)),
        )

    async def launch(self, name: str) -> Adder:
        self.workers.append(Adder(name))
        return self.workers[-1]

    async def send(self, other: int) -> int:
        return await self.pool.send(lambda: 1, lambda member: member.worker.add(other), lambda: {"numbers": [other]})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [details for each, details in self.events if each == kind]

    @staticmethod
    async def _prepare(member: Member[Adder]) -> Mapping[str, Any]:
        member.worker.number = 10
        return {"number": 10}


def play(scene: Callable[[Adders], Awaitable[None]], *prepare: Any) -> Adders:
    async def run() -> Adders:
        adders = Adders(*prepare)
        async with asyncio.timeout(60):
            adders.pool.start(adders.launch)
            try:
                await scene(adders)
            finally:
                await adders.pool.close()
        return adders

    return asyncio.run(run())


def test_workers_are_prepared_before_they_get_work_and_the_event_says_with_what() -> None:
    async def scene(adders: Adders) -> None:
        assert await asyncio.gather(*map(adders.send, range(20))) == list(range(10, 30))

    adders = play(scene)
    assert [event["number"] for event in adders.of("worker_started")] == [10, 10]
    assert all(worker.has_ended for worker in adders.workers)


def test_work_of_a_lost_worker_is_done_by_another() -> None:
    async def scene(adders: Adders) -> None:
        await adders.pool.until(lambda: len(adders.pool.members) == 2)
        adders.workers[0].fails = True
        assert await asyncio.gather(*map(adders.send, range(4))) == list(range(10, 14))
        adders.workers[0].death.set_result("its process was killed")
        await adders.pool.until(lambda: len(adders.workers) == 3 and len(adders.pool.members) == 2)

    adders = play(scene)
    assert adders.of("redispatched")[0]["reason"] == "worker-1.1: cannot add"
    assert "numbers" in adders.of("redispatched")[0]
    assert adders.of("worker_lost")[0]["reason"] == "its process was killed"


def test_work_that_every_worker_fails_at_ends_with_all_reasons() -> None:
    async def scene(adders: Adders) -> None:
        await adders.pool.until(lambda: len(adders.pool.members) == 2)
        for worker in adders.workers:
            worker.fails = True
        with pytest.raises(RetriesError) as raised:
            await adders.send(1)
        assert len(raised.value.reasons) == 3

    assert len(play(scene).of("redispatched")) == 2


def test_each_worker_is_asked_and_one_that_cannot_answer_is_replaced() -> None:
    async def scene(adders: Adders) -> None:
        await adders.pool.until(lambda: len(adders.pool.members) == 2)
        adders.workers[1].fails = True
        answers = await adders.pool.ask_each(lambda member: member.worker.add(5), "add")
        assert answers["worker-1.1"] == 15
        assert "worker-2.1" not in answers
        await adders.pool.until(lambda: len(adders.pool.members) == 2)

    adders = play(scene)
    assert adders.of("worker_lost")[0]["reason"] == "could not add: cannot add"


def test_a_pool_whose_workers_cannot_be_prepared_fails_with_its_reason() -> None:
    async def refuse(member: Member[Adder]) -> Mapping[str, Any]:
        raise WorkerError("no number")

    async def scene(adders: Adders) -> None:
        with pytest.raises(
            WorkerError, match="0 of the pool's workers are left and the fewest = 1; worker-1: no number"
        ):
            await adders.send(1)

    adders = play(scene, refuse)
    assert len(adders.of("seat_given_up")) == 2
    assert all(worker.has_ended for worker in adders.workers)


def test_a_mistake_in_the_settings_is_the_error_of_the_pool() -> None:
    async def refuse(member: Member[Adder]) -> Mapping[str, Any]:
        raise InputError("number = 'x' is not a number")

    async def scene(adders: Adders) -> None:
        with pytest.raises(InputError, match="not a number"):
            await adders.send(1)

    play(scene, refuse)
