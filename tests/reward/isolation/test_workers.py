"""Workers under attack: nothing hangs, nobody else pays, and afterwards the pool is as large as before."""

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from podium.errors import InputError, RewardContractError, RewardFailedError
from podium.records import Group
from podium.remote.fork_server import CallError, Child
from podium.remote.workers import Workers
from podium.reward.isolation import RewardWorkers
from podium.reward.scoring.stage import Failed, Outcome, Style
from tests.builders import make_prompt, make_rollout
from tests.reward.isolation.hostile import KINDS, LISTS

LIMIT_S = 0.4
SIZE = 2
HOSTILE = "tests.reward.isolation.hostile"
MEMORY_MB = 512


def group_of(texts: Sequence[str], ordinal: int = 0, **prompt: Any) -> Group:
    return Group(make_prompt(ordinal, **prompt), tuple(make_rollout(text) for text in texts))


def workers_for(*names: str, size: int = SIZE) -> RewardWorkers:
    return RewardWorkers([{"name": name, "options": {}} for name in names], size, MEMORY_MB)


def run(workers: RewardWorkers, use: Callable[[RewardWorkers], Coroutine[Any, Any, Any]]) -> Any:
    """The pool lives in one event loop; it is closed whatever happens."""

    async def with_pool() -> Any:
        return await asyncio.wait_for(use(workers), 120)

    try:
        return asyncio.run(with_pool())
    finally:
        workers.close()


def score(name: str, group: Group, style: Style = "each", limit_s: float = 5.0) -> list[Outcome]:
    return run(workers_for(name), lambda workers: workers.score(name, style, limit_s, group))


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


# ---- the corpus: every misdeed, in every style, through one pool

CORPUS: list[tuple[Style, str]] = [
    *(("each", name) for name in KINDS),
    *(("together", name) for name, kind in KINDS.items() if kind in ("dead", "full", "garbled", "raised")),
    ("together", "sleeps"),
    ("together", "returns nan"),
    ("batched", "sleeps"),
    ("batched", "reads address 0"),
    ("batched", "raises a key error"),
    ("batched", "returns nan"),
    *(("batched", name) for name in LISTS),
]
REWARDS: dict[Style, str] = {
    "each": f"{HOSTILE}:hostile",
    "together": f"{HOSTILE}:hostile_together",
    "batched": f"{HOSTILE}:hostile_batched",
}


@pytest.fixture(scope="module")
def aftermath() -> dict[Any, Any]:
    """(style, misdeed) → (outcomes or error, seconds); "capacity" → what the pool can do when all is over."""
    found: dict[Any, Any] = {}
    counting = f"{HOSTILE}:process_number"

    async def attack(workers: RewardWorkers, style: Style, name: str) -> None:
        group = group_of(["good", "bad", "good", "good"], answer=name)
        limit_s = LIMIT_S if expected_kind(name) == "late" else 10.0
        started = time.monotonic()
        try:
            outcome: Any = await workers.score(REWARDS[style], style, limit_s, group)
        except RewardContractError as error:
            outcome = error
        found[style, name] = outcome, time.monotonic() - started

    async def use(workers: RewardWorkers) -> None:
        await workers.score(counting, "each", 60.0, group_of(["x"]))  # the start is nobody's fault
        for style, name in CORPUS:  # one after the other, so that the seconds are its own
            await attack(workers, style, name)
        poison = group_of(["bad"] * 2 * SIZE, answer="sleeps")
        poisoned = [workers.score(REWARDS["each"], "each", LIMIT_S, poison) for _ in range(2 * SIZE)]
        found["poisoned"] = await asyncio.gather(*poisoned)
        started = time.monotonic()
        calls = [workers.score(counting, "each", 5.0, group_of(["x"])) for _ in range(SIZE)]
        found["capacity"] = await asyncio.gather(*calls), time.monotonic() - started

    run(workers_for(*REWARDS.values(), counting), use)
    return found


def expected_kind(name: str) -> str:
    return "breach" if name in LISTS else KINDS[name]


REASONS = {
    "late": r"timeout after 0\.4 s",
    "dead": r"its process (exited with code \d+|was killed by SIG\w+)|its processor time was used up",
    "full": r"its process ran out of memory, see scoring.worker_memory_mb",
    "garbled": r"its process sent what no reward returns",
    "raised": r"\w+ at hostile\.py:\d+(: .*)?",
}


@pytest.mark.parametrize(("style", "name"), CORPUS)
def test_a_misdeed_costs_its_own_rollout_and_no_other(style: Style, name: str, aftermath: dict[Any, Any]) -> None:
    outcomes, seconds = aftermath[style, name]
    kind = expected_kind(name)
    if kind == "breach":
        assert isinstance(outcomes, RewardContractError)
        assert str(outcomes).startswith(f"reward '{REWARDS[style]}' on prompt 0 (arithmetic) returned ")
        return
    assert isinstance(outcomes[1], Failed)
    assert re.fullmatch(REASONS[kind], outcomes[1].reason, re.DOTALL), outcomes[1].reason
    if kind == "late":
        assert LIMIT_S <= seconds < limit_of(style) + BUSY_S
    if style == "batched":
        assert outcomes == [outcomes[1]] * 4
    else:
        assert [outcomes[0], *outcomes[2:]] == [1.0, 1.0, 1.0]


def limit_of(style: Style) -> float:
    """Of coroutines it shows only when each is tried alone which one held up the others."""
    return LIMIT_S * (2 if style == "together" else 1)


BUSY_S = 20.0
"""What else the machine does may hold up a single one for so long."""


def test_the_misdeeds_that_do_not_end_are_ended_within_a_second_of_their_limit(aftermath: dict[Any, Any]) -> None:
    late = [(style, name) for style, name in CORPUS if expected_kind(name) == "late"]
    overruns = sorted(aftermath[style, name][1] - limit_of(style) for style, name in late)
    assert overruns[len(overruns) // 2] < 1, overruns


async def waits(prompt: Any, rollout: Any) -> float:
    await asyncio.sleep(600 if rollout.text == "slow" else 0.05)
    return float(os.getpid())


def test_coroutines_wait_beside_each_other_and_a_slow_one_costs_no_worker() -> None:
    name = f"{__name__}:waits"

    async def use(workers: RewardWorkers) -> Any:
        (pid,) = await workers.score(name, "together", LIMIT_S, group_of(["quick"]))
        started = time.monotonic()
        outcomes = await workers.score(name, "together", LIMIT_S, group_of([*["quick"] * 20, "slow"]))
        seconds = time.monotonic() - started
        return pid, outcomes, seconds, await workers.score(name, "each", LIMIT_S, group_of(["quick"]))

    pid, outcomes, seconds, after = run(workers_for(name, size=1), use)
    assert outcomes == [pid] * 20 + [Failed("timeout after 0.4 s")]
    assert after == [pid]
    assert seconds < 20 * 0.05  # what the quick ones alone would take in turn


def test_the_corpus_is_large_enough() -> None:
    kinds = [expected_kind(name) for _, name in CORPUS]
    assert len({name for _, name in CORPUS}) >= 50
    assert kinds.count("late") >= 10
    assert kinds.count("breach") >= 20


def test_more_poison_than_workers_leaves_the_pool_as_large_as_it_was(aftermath: dict[Any, Any]) -> None:
    assert aftermath["poisoned"] == [[Failed("timeout after 0.4 s")] * 2 * SIZE] * 2 * SIZE
    outcomes, seconds = aftermath["capacity"]
    pids = {pid for (pid,) in outcomes}
    assert len(pids) == SIZE
    assert seconds < SIZE * 0.2 + 0.2  # they slept beside each other


# ---- one thing at a time


def test_a_reward_cannot_change_what_its_neighbours_or_the_run_see(tmp_path: Path, capfd: Any) -> None:
    group = group_of(["a", "b", "c"], answer=["a"], metadata={"list": [1, 2]})
    before = random.getstate(), os.getcwd(), dict(os.environ), list(sys.path), signal.getsignal(signal.SIGTERM)
    assert score(f"{HOSTILE}:untidy", group) == [1.0, 1.0, 1.0]
    assert (random.getstate(), os.getcwd(), dict(os.environ), list(sys.path)) == before[:4]
    assert signal.getsignal(signal.SIGTERM) == before[4]
    assert group.prompt.answer == ["a"]
    assert group.prompt.metadata == {"list": [1, 2]}
    assert capfd.readouterr().out == ""  # what it printed went to standard error


def test_what_a_reward_draws_depends_on_the_prompt_and_not_on_the_worker() -> None:
    async def use(workers: RewardWorkers) -> list[list[Outcome]]:
        groups = [group_of(["a", "b"], ordinal=ordinal) for ordinal in (7, 8, 7)]
        return [await workers.score(f"{HOSTILE}:draws", "each", 5.0, group) for group in groups]

    first, other, again = run(workers_for(f"{HOSTILE}:draws"), use)
    assert first == again
    assert first != other


def test_what_a_reward_sets_in_its_context_is_gone_at_the_next_call() -> None:
    async def use(workers: RewardWorkers) -> list[list[Outcome]]:
        name = f"{HOSTILE}:narrows_its_context"
        return [await workers.score(name, "each", 5.0, group_of(["a"], ordinal=ordinal)) for ordinal in range(3)]

    assert run(workers_for(f"{HOSTILE}:narrows_its_context", size=1), use) == [[28.0], [28.0], [28.0]]


def test_a_driver_that_was_held_up_does_not_call_its_rewards_late() -> None:
    name = f"{HOSTILE}:process_number"  # takes 0.2 s

    async def use(workers: RewardWorkers) -> list[Outcome]:
        group = group_of(["a"])
        await workers.score(name, "each", 5.0, group)
        scoring = asyncio.create_task(workers.score(name, "each", LIMIT_S, group))
        await asyncio.sleep(0.05)
        time.sleep(2 * LIMIT_S)  # the event loop sees answer and deadline at the same moment
        return await scoring

    (outcome,) = run(workers_for(name), use)
    assert isinstance(outcome, float)


def test_a_worker_that_died_is_given_the_call_once_more(tmp_path: Path) -> None:
    """The cause may have been outside: the kernel short of memory, an administrator."""
    assert score(f"{HOSTILE}:dies_once", group_of(["a", "b"], answer=str(tmp_path / "done"))) == [1.0, 1.0]
    assert (tmp_path / "done").exists()


def test_a_reward_that_leaks_memory_is_scored_by_ever_fresh_workers() -> None:
    """100 MB a call with 512 MB allowed: the fifth or so no longer fits beside the others, but does alone."""
    assert score(f"{HOSTILE}:leaks", group_of(["a"] * 12)) == [1.0] * 12


def test_the_pool_recovers_when_the_fork_server_is_killed(tmp_path: Path) -> None:
    group = group_of(["a", "b"], answer=str(tmp_path / "done"))
    assert score(f"{HOSTILE}:kills_the_fork_server", group, limit_s=20.0) == [1.0, 1.0]
    assert (tmp_path / "done").exists()


def test_idle_workers_that_went_with_their_fork_server_fail_nobody() -> None:
    """Four of them wait when the fork server is killed; a group may only be tried twice."""
    group = group_of(["#### 3", "#### 4"], answer="3")

    async def use(workers: RewardWorkers) -> list[list[Outcome]]:
        await asyncio.gather(*(workers.score("gsm8k", "each", 5.0, group) for _ in range(4)))
        assert len(workers._idle) > 1
        os.kill(workers._server.pid, signal.SIGKILL)  # type: ignore[union-attr, arg-type]
        await asyncio.sleep(0.5)
        return await asyncio.gather(*(workers.score("gsm8k", "each", 5.0, group) for _ in range(4)))

    assert run(RewardWorkers([{"name": "gsm8k", "options": {}}], 4, 1024), use) == [[1.0, 0.0]] * 4


def test_a_daemon_does_not_outlive_its_worker(tmp_path: Path) -> None:
    name, file = f"{HOSTILE}:leaves_a_daemon", tmp_path / "pid"

    async def use(workers: RewardWorkers) -> tuple[list[Outcome], int, bool]:
        outcomes = await workers.score(name, "each", 5.0, group_of(["a"], answer=str(file)))
        daemon = int(file.read_text())
        return outcomes, daemon, is_alive(daemon)  # the pool is still open

    outcomes, daemon, survived = run(workers_for(name), use)
    assert outcomes == [Failed("its process exited with code 3")]
    assert daemon > 1
    assert not survived


DRIVER = """
import asyncio, os, sys
from tests.reward.isolation.test_workers import HOSTILE, group_of, workers_for

async def main():
    workers = workers_for(f"{HOSTILE}:hostile", f"{HOSTILE}:process_number")
    number, = await workers.score(f"{HOSTILE}:process_number", "each", 5.0, group_of(["a"]))
    print(os.getpid(), workers._server.pid, int(number), flush=True)
    await workers.score(f"{HOSTILE}:hostile", "each", 600.0, group_of(["bad"], answer=sys.argv[1]))

asyncio.run(main())
"""


@pytest.mark.parametrize("misdeed", ["sleeps", "loops for ever", "ignores every signal"])
def test_no_process_is_left_when_the_driver_is_killed(misdeed: str) -> None:
    with subprocess.Popen([sys.executable, "-c", DRIVER, misdeed], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        time.sleep(0.2)  # the worker is in the middle of it
        assert len(pids) == 3
        assert all(is_alive(pid) for pid in pids)
        driver.kill()
    assert wait_until(lambda: not any(is_alive(pid) for pid in pids))


IMPORTER = """
import asyncio, os, sys
from tests.reward.isolation.test_workers import group_of, workers_for

async def main():
    print(os.getpid(), flush=True)
    await workers_for(sys.argv[1]).score(sys.argv[1], "each", 5.0, group_of(["a"]))

asyncio.run(main())
"""


def test_a_reward_that_hangs_while_it_is_imported_does_not_outlive_the_driver(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    reward = tmp_path / "endless.py"
    reward.write_text(f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    with subprocess.Popen([sys.executable, "-c", IMPORTER, f"{reward}:f"], stdout=subprocess.PIPE) as driver:
        assert wait_until(lambda: mark.exists() and mark.read_text() != "", 30)
        assert is_alive(int(mark.read_text()))
        driver.kill()
    assert wait_until(lambda: not is_alive(int(mark.read_text())))


def test_close_ends_every_process() -> None:
    workers = workers_for(f"{HOSTILE}:process_number")

    async def use(workers: RewardWorkers) -> tuple[int, int]:
        (pid,) = await workers.score(f"{HOSTILE}:process_number", "each", 5.0, group_of(["a"]))
        assert workers._server is not None
        assert workers._server.pid is not None
        return int(pid), workers._server.pid

    pids = run(workers, use)
    assert not any(is_alive(pid) for pid in pids)


class Adder:
    """Any object can be served, not only rewards."""

    def __init__(self, start: int) -> None:
        self.total = start

    def add(self, content: bytes, reply: Callable[[bytes], None]) -> None:
        self.total += int(content)
        reply(f"{self.total} {os.getpid()}".encode())


def test_a_worker_that_is_lent_keeps_its_state_until_the_block_ends_and_an_exception_kills_it() -> None:
    workers = Workers(f"{__name__}:Adder", {"start": 10}, 2, MEMORY_MB)

    async def added(worker: Child, number: int) -> list[int]:
        reply = await worker.call("add", str(number).encode(), 5.0)
        return [int(part) for part in reply.split()]

    async def breaks(pids: list[int]) -> None:
        async with workers.lend() as worker:
            pids.append(worker.pid)
            await worker.call("add", b"no number", 5.0)

    async def use() -> None:
        pids: list[int] = []
        async with workers.lend() as one, workers.lend() as other:
            total, pid = await added(one, 1)
            assert total == 11
            assert await added(one, 2) == [13, pid]
            total, other_pid = await added(other, 5)
            assert total == 15  # the other episode's state is its own
            assert other_pid != pid
        with pytest.raises(CallError, match="ValueError"):
            await breaks(pids)
        assert wait_until(lambda: not is_alive(pids[0]))

    try:
        asyncio.run(use())
    finally:
        workers.close()


def test_rewards_that_cannot_be_imported_are_told_with_the_reason() -> None:
    with pytest.raises(RewardFailedError, match=r"cannot be started: InputError: .*no_such_module"):
        score("no_such_module:reward", group_of(["a"]))


def test_a_prompt_that_is_not_plain_data_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"prompt 5 \(arithmetic\): answer: \(1, 2\) is not plain data"):
        score("gsm8k", group_of(["a"], ordinal=5, answer=(1, 2)))
    with pytest.raises(InputError, match=re.escape("metadata: {'a': {1}} is not plain data")):
        score("gsm8k", group_of(["a"], metadata={"a": {1}}))
