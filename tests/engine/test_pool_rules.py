"""The rules of a pool, on fake workers: who gets what, who is replaced when, what happens to what was under way."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from podium.errors import BusyError, EngineError, InputError, WeightsError
from podium.records import Request, Sampling
from podium.remote.pool import Limit
from tests.engine.crew import Crew, FakeWorker, a_step, crash, seeds


def play(scene: Callable[[Crew], Awaitable[None]], *prepared: Any, **others: Any) -> Crew:
    """Runs the scene with a crew that has version 0; a time limit, since nothing here may hang."""

    async def run() -> Crew:
        crew = Crew(*prepared, **others)
        async with asyncio.timeout(30), crew:
            await crew.push(0)
            await scene(crew)
        return crew

    return asyncio.run(run())


# Routing


def test_requests_go_to_the_member_with_the_fewest_rollouts_in_flight() -> None:
    async def scene(crew: Crew) -> None:
        for worker in crew.workers:
            worker.seconds = 0.05
        await crew.generate(4)

    crew = play(scene)
    assert [len(worker.asked) for worker in crew.workers] == [4, 4]


def test_a_prefix_group_is_asked_of_one_member() -> None:
    async def scene(crew: Crew) -> None:
        answers = await crew.generate(5, rollouts=3)
        assert [answer.token_ids for answer in answers] == [(seed,) for seed in seeds(5, 3)]

    crew = play(scene)
    prompts = [{seed // 10 for seed in worker.asked} for worker in crew.workers]
    assert prompts[0] | prompts[1] == set(range(5))
    assert not prompts[0] & prompts[1]


def test_an_episode_stays_with_its_member_and_goes_to_another_when_that_is_lost() -> None:
    def turn(episode: str, seed: int) -> Request:
        return Request((1, 2), Sampling(), seed, episode=episode)

    async def scene(crew: Crew) -> None:
        for seed in (0, 10, 20):
            await asyncio.gather(*(crew.engine.generate(turn(f"e{k}", seed + k)) for k in range(2)))
        first, second = crew.workers
        assert sorted((sorted(first.asked), sorted(second.asked))) == [[0, 10, 20], [1, 11, 21]]
        crew.engine.release("e1")
        first.die()
        await crew.until(lambda: first.has_ended)
        assert (await crew.engine.generate(turn("e0", 30))).token_ids == (30,)
        assert list(crew.engine._homes) == ["e0"]

    play(scene)


def test_a_member_is_asked_for_no_more_than_its_limit_and_a_larger_group_goes_to_an_idle_one() -> None:
    most = 0

    async def scene(crew: Crew) -> None:
        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, *(member.num_in_flight for member in crew.members))
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        for worker in crew.workers:
            worker.seconds = 0.02
        await crew.generate(12)  # 24 rollouts, 4 at a time on each of two members
        assert most == 4
        await crew.generate(2, rollouts=7)
        assert most == 7
        watching.cancel()

    play(scene, concurrency=4)


def test_members_that_keep_the_order_get_the_same_batches_and_one_at_a_time() -> None:
    """Four prompts per batch. The rounding of such a member depends on its batch."""
    batches: list[set[int]] = []

    async def scene(crew: Crew) -> None:
        for worker in crew.workers:
            worker.seconds = 0.05
        asking = asyncio.create_task(crew.generate(14))
        while not asking.done():
            now = [set(worker.asked) for worker in crew.workers]
            await asyncio.sleep(0.01)
            batches.extend(set(w.asked) - old for w, old in zip(crew.workers, now, strict=True) if set(w.asked) - old)
        assert [answer.token_ids for answer in await asking] == [(seed,) for seed in seeds(14)]

    play(scene, keeps_order=True)
    assert sorted(map(sorted, batches)) == [seeds(14)[first : first + 8] for first in range(0, 28, 8)]


def test_whoever_goes_away_leaves_nothing_behind() -> None:
    async def scene(crew: Crew) -> None:
        for worker in crew.workers:
            worker.seconds = 0.05
        asking = [asyncio.ensure_future(crew.engine.generate(request)) for request in a_step(20)]
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        for each in asking:
            each.cancel()
        await crew.until(lambda: [member.num_in_flight for member in crew.members] == [0, 0])
        assert len(await crew.generate(3)) == 6

    play(scene, concurrency=4)


def test_a_fixed_limit_stays_and_an_adaptive_one_is_found() -> None:
    """64 to begin with; 8 more when others wait; a quarter less when a token takes twice the best time; half."""
    fixed, adaptive = Limit(10), Limit(None)
    for limit in (fixed, adaptive):
        limit.finished(1.0, 100, step=8, wanted=True)
    assert (fixed.size, adaptive.size) == (10, 72)
    adaptive.finished(1.0, 100, step=8, wanted=False)
    assert adaptive.size == 72
    adaptive.finished(2.1, 100, step=8, wanted=True)
    assert adaptive.size == 54
    adaptive.refused()
    assert adaptive.size == 27
    for _ in range(9):
        adaptive.refused()
    assert adaptive.size == Limit.LEAST


def test_a_busy_member_is_left_alone_for_a_while_and_that_is_no_failure() -> None:
    async def scene(crew: Crew) -> None:
        busy = iter([BusyError("later")] * 2)
        crew.workers[0].fails = lambda: next(busy, None)
        assert len(await crew.generate(8)) == 16
        assert not crew.of("redispatched")

    play(scene, rules={"max_redispatches": 0, "recovery_s": 10.0})


def test_members_that_are_always_busy_are_an_error_in_the_end() -> None:
    async def scene(crew: Crew) -> None:
        for worker in crew.workers:
            worker.fails = lambda: BusyError("later")
        with pytest.raises(EngineError, match="busy for"):
            await crew.generate(1)

    play(scene, rules={"recovery_s": 0.6})


# Loss


def test_what_a_dead_member_was_writing_is_written_by_another_once() -> None:
    async def scene(crew: Crew) -> None:
        victim = crew.workers[0]
        for worker in crew.workers:
            worker.seconds = 0.05
        asking = asyncio.create_task(crew.generate(8))
        await crew.until(lambda: len(victim.asked) > 0)
        victim.die()
        answers = await asking
        assert [answer.token_ids for answer in answers] == [(seed,) for seed in seeds(8)]
        await crew.until(lambda: len(crew.members) == 2)

    crew = play(scene)
    assert crew.of("worker_lost")[0]["reason"] == "its process was killed by SIGKILL"
    assert crew.of("redispatched")[0]["worker"] == "worker-1.1"
    assert [event["worker"] for event in crew.of("worker_started")] == ["worker-1.1", "worker-2.1", "worker-1.2"]
    assert crew.workers[0].has_ended


@pytest.mark.parametrize("keeps_order", [False, True])
def test_what_is_missing_is_sent_again_and_where_order_is_kept_the_whole_batch(keeps_order: bool) -> None:
    async def scene(crew: Crew) -> None:
        first = iter([None, None, EngineError("broke off")])
        for worker in crew.workers:
            worker.fails = lambda: next(first, None)
        answers = await crew.generate(1, rollouts=4)
        assert [answer.token_ids for answer in answers] == [(seed,) for seed in range(4)]

    crew = play(scene, keeps_order=keeps_order)
    again = [0, 1, 2, 3] if keeps_order else [2]  # the last had its answer by then
    assert sorted((worker.asked for worker in crew.workers), key=len) == sorted([again, [0, 1, 2, 3]], key=len)
    [event] = crew.of("redispatched")
    assert (event["request"], event["rollouts"]) == ("request train/0", 1)


def test_a_request_at_which_every_member_fails_is_an_error_that_names_them() -> None:
    async def scene(crew: Crew) -> None:
        for worker in crew.workers:
            worker.fails = lambda: EngineError("no")
        with pytest.raises(EngineError, match=r"train/0: 2 rollouts were given up after 3 members.*worker-\d\.1: no"):
            await crew.generate(1)

    assert len(play(scene).of("redispatched")) == 2


def test_a_mistake_of_the_run_is_not_tried_again() -> None:
    async def scene(crew: Crew) -> None:
        for worker in crew.workers:
            worker.fails = lambda: InputError("the prompt is too long")
        with pytest.raises(InputError, match="too long"):
            await crew.generate(1)

    assert not play(scene).of("redispatched")


def test_a_member_that_fails_again_and_again_is_replaced() -> None:
    async def scene(crew: Crew) -> None:
        crew.workers[0].fails = lambda: EngineError("no")
        while len(crew.workers) < 3:
            await crew.generate(2)
            await asyncio.sleep(0.02)

    crew = play(scene, rules={"max_redispatches": 5})
    assert "3 requests in a row failed" in crew.of("worker_lost")[0]["reason"]


def test_the_death_of_a_process_is_told_as_such_though_its_requests_broke_off_first() -> None:
    async def scene(crew: Crew) -> None:
        first = next(iter(crew.members))
        first.mark_lost("3 requests in a row failed")
        await asyncio.sleep(0.05)
        crew.workers[0].die()
        await crew.until(lambda: len(crew.of("worker_started")) == 3)

    assert play(scene).of("worker_lost")[0]["reason"] == "its process was killed by SIGKILL"


def test_a_frozen_member_is_noticed_and_ended() -> None:
    async def scene(crew: Crew) -> None:
        await asyncio.sleep(0.1)
        crew.workers[0].is_frozen = True
        began = time.monotonic()
        assert len(await crew.generate(4)) == 8
        assert time.monotonic() - began < 60
        await crew.until(lambda: len(crew.members) == 2)
        assert crew.workers[0].has_ended

    assert "frozen" in play(scene, stalled_s=30.0).of("worker_lost")[0]["reason"]


def test_a_member_that_answers_but_does_not_generate_is_noticed() -> None:
    async def scene(crew: Crew) -> None:
        crew.workers[0].seconds = 1e6
        await crew.until(lambda: len(crew.workers) == 3, limit_s=20)

    assert "stalled" in play(scene, stalled_s=0.5).of("worker_lost")[0]["reason"]


def test_taking_weights_is_no_stall() -> None:
    async def scene(crew: Crew) -> None:
        for member in crew.members:
            member.loads += 1  # as while weights are being taken
        crew.workers[0].seconds = 1e6
        await asyncio.sleep(1.5)
        assert not crew.of("worker_lost")

    play(scene, stalled_s=0.3)


def test_lateness_of_this_process_is_not_held_against_a_member() -> None:
    """The whole loop stands still for longer than a member may be silent, four times."""

    async def scene(crew: Crew) -> None:
        for _ in range(4):
            await asyncio.sleep(0.01)
            time.sleep(1.0)
        await asyncio.sleep(0.1)

    assert not play(scene).of("worker_lost")


# Weights


def test_a_replacement_takes_the_current_weights_before_it_serves() -> None:
    async def scene(crew: Crew) -> None:
        await crew.push(7)
        crew.workers[1].die()
        await crew.until(lambda: len(crew.of("worker_started")) == 3)
        assert crew.workers[2].policy_version == 7
        answers = await crew.generate(8)
        assert {answer.policy_versions for answer in answers} == {(7, 7)}

    assert play(scene).of("worker_started")[2]["policy_version"] == 7


@pytest.mark.parametrize("fault", [WeightsError("confirmed other weights"), EngineError("broke off"), 0])
def test_a_member_that_does_not_confirm_a_push_is_out_of_service_and_the_others_go_on(fault: Any) -> None:
    async def scene(crew: Crew) -> None:
        crew.workers[0].takes = lambda version: fault
        await crew.push(1)
        assert [member.worker for member in crew.members] == [crew.workers[1]]
        answers = await crew.generate(6)
        assert {answer.policy_versions for answer in answers} == {(1, 1)}
        await crew.until(lambda: len(crew.members) == 2)

    crew = play(scene)
    assert "did not take version 1" in crew.of("worker_lost")[0]["reason"]
    assert crew.workers[0].has_ended
    assert crew.workers[2].policy_version == 1


def test_weights_that_all_refuse_are_an_error_and_the_old_ones_stay() -> None:
    async def scene(crew: Crew) -> None:
        for worker in crew.workers:
            worker.takes = lambda version: WeightsError("not finite") if version == 1 else version
        with pytest.raises(WeightsError, match=r"no member took version 1.*worker-1: not finite"):
            await crew.push(1)
        answers = await crew.generate(4)
        assert {answer.policy_versions for answer in answers} == {(0, 0)}
        await crew.push(2)

    assert not play(scene).of("worker_lost")


def test_pushes_do_not_overlap() -> None:
    async def scene(crew: Crew) -> None:
        await asyncio.gather(*(crew.push(version) for version in range(1, 6)))
        assert {worker.most_loading for worker in crew.workers} == {1}
        assert {worker.policy_version for worker in crew.workers} == {5}

    play(scene)


def test_a_member_that_starts_during_a_push_takes_the_newer_weights() -> None:
    async def scene(crew: Crew) -> None:
        crew.workers[0].die()
        await crew.until(lambda: len(crew.workers) == 3)
        await crew.push(1)
        await crew.until(lambda: len(crew.members) == 2)
        assert {member.policy_version for member in crew.members} == {1}

    play(scene)


def test_a_replacement_whose_logprobs_differ_does_not_serve_and_is_named() -> None:
    def prepare(worker: FakeWorker) -> None:
        if worker.name == "worker-1.2":
            worker.logprob = -1.5

    async def scene(crew: Crew) -> None:
        scores = await crew.engine.score_each([1, 2, 3])
        assert scores == {"worker-1.1": [-1.0, -1.0], "worker-2.1": [-1.0, -1.0]}
        crew.workers[0].die()
        await crew.until(lambda: len(crew.of("worker_started")) == 3)

    crew = play(scene, prepare)
    assert [event["worker"] for event in crew.of("worker_started")][-1] == "worker-1.3"
    assert "worker-1.2 says that it holds version 0, but its logprobs differ" in crew.of("start_failed")[0]["reason"]


def test_a_member_that_joins_during_a_probe_is_asked_too() -> None:
    async def scene(crew: Crew) -> None:
        asked: list[str] = []

        async def slow(token_ids: Sequence[int]) -> list[float]:
            """The second member is lost, and its place filled, while the first is still at it."""
            asked.append("worker-1.1")
            crew.workers[1].die()
            await crew.until(lambda: len(crew.of("worker_started")) == 3)
            return [-1.0] * (len(token_ids) - 1)

        crew.workers[0].score = slow
        scores = await crew.engine.score_each([1, 2, 3])
        assert asked == ["worker-1.1"]  # once
        assert "worker-2.2" in scores

    play(scene)


# Coming and going


def test_a_pool_whose_workers_cannot_start_fails_within_its_deadline() -> None:
    async def run() -> Crew:
        crew = Crew(crash)
        async with asyncio.timeout(20), crew:
            with pytest.raises(EngineError, match=r"0 of the pool's engines are left.*worker-1: cannot start"):
                await crew.push(0)
            with pytest.raises(EngineError, match="cannot start"):
                await crew.push(1)
        return crew

    crew = asyncio.run(run())
    assert len(crew.of("start_failed")) == 6  # two replicas, one start and two restarts each
    assert len(crew.of("seat_given_up")) == 2


def test_requests_end_with_the_pool_when_all_members_die_and_none_can_start() -> None:
    async def scene(crew: Crew) -> None:
        for worker in crew.workers:
            worker.seconds = 30.0
        asking = asyncio.create_task(crew.generate(4))
        await asyncio.sleep(0.1)
        crew.engine.prepare = crash
        for worker in list(crew.workers):
            worker.die()
        with pytest.raises(EngineError, match="cannot start"):
            await asking

    play(scene)


def test_a_pool_below_its_floor_for_too_long_fails() -> None:
    async def scene(crew: Crew) -> None:
        async def hang(version: int) -> None:
            await asyncio.sleep(1e6)

        crew.engine.prepare = lambda worker: setattr(worker, "load", lambda folder, version: hang(version))
        crew.workers[0].die()
        with pytest.raises(EngineError, match=r"fewer than 2 engines in service for 0\.5 s"):
            await crew.pool.until(lambda: False)

    play(scene, rules={"floor": 2, "recovery_s": 0.5, "start_s": 30.0})


def test_members_are_added_while_requests_wait_and_retired_when_idle() -> None:
    async def scene(crew: Crew) -> None:
        crew.engine.prepare = lambda worker: setattr(worker, "seconds", 0.2)
        crew.workers[0].seconds = 0.2
        assert len(await crew.generate(20)) == 40
        assert len(crew.of("scaled")) == 2
        await crew.until(lambda: len(crew.members) == 1)

    crew = play(scene, rules={"replicas": (1, 3), "idle_s": 1.0}, concurrency=2)
    assert [event["members"] for event in crew.of("scaled")] == [2, 3, 2, 1]
    assert not crew.of("worker_lost")
    assert [worker.has_ended for worker in crew.workers].count(True) == 3  # the last one when the pool closed
