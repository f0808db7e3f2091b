"""What every object in another process is promised, whatever it computes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from podium.remote.fork_server import (
    BlockingChild,
    CallError,
    Child,
    DiedError,
    ForkServer,
    GarbledError,
    StartError,
)

T = TypeVar("T")
Reply = Callable[[bytes], None]
LONG_S = 60.0


class Served:
    """An object as Podium runs them: each method takes bytes and replies with bytes."""

    def __init__(self, name: str) -> None:
        if name == "broken":
            raise ValueError("it cannot be made")
        self._made_in, self._name, self._count = os.getpid(), name, 0

    def about(self, _: bytes, reply: Reply) -> None:
        self._count += 1
        here = {"pid": os.getpid(), "made_in": self._made_in, "name": self._name, "count": self._count}
        reply(json.dumps(here | {"mark": os.environ.get("PODIUM_MARK")}).encode())

    def echo(self, content: bytes, reply: Reply) -> None:
        reply(content)

    def twice(self, content: bytes, reply: Reply) -> None:
        reply(content)
        reply(content)

    def fail(self, content: bytes, reply: Reply) -> None:
        raise KeyError(content.decode())

    def late(self, _: bytes, reply: Reply) -> None:
        time.sleep(0.5)
        reply(b"x" * 5_000_000)

    def sleep(self, _: bytes, reply: Reply) -> None:
        time.sleep(LONG_S)

    def exit(self, content: bytes, reply: Reply) -> None:
        os._exit(int(content))

    def garble(self, content: bytes, reply: Reply) -> None:
        os.write(reply.__self__._descriptor, content)  # type: ignore[attr-defined]

    def leave_daemon(self, _: bytes, reply: Reply) -> None:
        """In a session of its own, which a signal to the child's group does not reach."""
        daemon = subprocess.Popen(["sleep", str(LONG_S)], start_new_session=True)
        reply(str(daemon.pid).encode())


def server(name: str = "a", is_shared: bool = True, **options: Any) -> ForkServer:
    recipe = "tests.remote.test_fork_server:Served"
    return ForkServer(recipe, {"name": name}, is_shared=is_shared, start_s=LONG_S, **options)


def with_child(use: Callable[[Child], Awaitable[T]], **options: Any) -> T:
    async def run() -> T:
        with closing(server(**options)) as forks, closing(await forks.fork()) as child:
            return await use(child)

    return asyncio.run(run())


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until_gone(*pids: int) -> None:
    deadline = time.monotonic() + LONG_S
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a process was left"
        time.sleep(0.02)


async def about(child: Child) -> dict[str, Any]:
    return json.loads(await child.call("about", b"", LONG_S))


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_child_has_the_object_and_keeps_its_state(is_shared: bool) -> None:
    async def use(child: Child) -> None:
        first, second = await about(child), await about(child)
        assert first["pid"] == second["pid"] == child.pid != os.getpid()
        assert (first["name"], first["count"], second["count"]) == ("a", 1, 2)
        assert (first["made_in"] == child.pid) is not is_shared

    with_child(use, is_shared=is_shared)


def test_children_are_separate_and_get_an_environment_of_their_own() -> None:
    async def run() -> None:
        with closing(server(environment={"PODIUM_MARK": "all"})) as forks:
            plain, marked = await asyncio.gather(forks.fork(), forks.fork({"PODIUM_MARK": "one"}))
            with closing(plain), closing(marked):
                told = [await about(plain), await about(plain), await about(marked)]
            assert [each["count"] for each in told] == [1, 2, 1]
            assert [each["mark"] for each in told] == ["all", "all", "one"]

    asyncio.run(run())


def test_a_child_that_nobody_reads_any_more_ends_without_a_word(tmp_path: Path) -> None:
    async def run() -> None:
        with (tmp_path / "output").open("wb") as output, closing(server(output=output.fileno())) as forks:
            child = await forks.fork()
            await child.send("late", b"", LONG_S)
            child.close()
            await asyncio.to_thread(until_gone, child.pid)

    asyncio.run(run())
    assert (tmp_path / "output").read_text() == ""


@pytest.mark.parametrize("size", [0, 1, 1 << 16, 5_000_003])
def test_bytes_of_any_length_arrive(size: int) -> None:
    content = os.urandom(size)
    assert with_child(lambda child: child.call("echo", content, LONG_S)) == content


def test_an_exception_is_told_and_the_child_goes_on() -> None:
    async def use(child: Child) -> bytes:
        with pytest.raises(CallError, match="KeyError: 'this'"):
            await child.call("fail", b"this", LONG_S)
        with pytest.raises(CallError, match="AttributeError"):
            await child.call("no_such_method", b"", LONG_S)
        return await child.call("echo", b"x", LONG_S)

    assert with_child(use) == b"x"


def test_a_call_has_a_deadline() -> None:
    async def use(child: Child) -> int:
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            await child.call("sleep", b"", 0.2)
        assert time.monotonic() - started < LONG_S / 2
        await child.bury()
        return child.pid

    until_gone(with_child(use))


@pytest.mark.parametrize(("how", "told"), [("exit", "exit code 3|code 3"), ("kill", "SIGKILL")])
def test_a_death_is_noticed_at_once_and_told(how: str, told: str) -> None:
    async def use(child: Child) -> None:
        if how == "kill":
            asyncio.get_running_loop().call_later(0.3, os.kill, child.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(DiedError, match=told) as caught:
            await child.call("sleep" if how == "kill" else "exit", b"3", LONG_S)
        assert time.monotonic() - started < LONG_S / 2
        assert caught.value.status == (3 if how == "exit" else -signal.SIGKILL)
        assert not child.is_alive

    with_child(use)


def test_the_death_of_an_idle_child_wakes_who_waits_for_it() -> None:
    async def use(child: Child) -> str:
        asyncio.get_running_loop().call_later(0.2, os.kill, child.pid, signal.SIGKILL)
        return await asyncio.wait_for(child.ended(), LONG_S)

    assert "SIGKILL" in with_child(use)


@pytest.mark.parametrize("content", [b"\0\0\0\0", b"\1\0\0\0x", b"\xff\xff\xff\xff="])
def test_what_is_no_reply_is_refused(content: bytes) -> None:
    async def use(child: Child) -> None:
        await child.send("garble", content, LONG_S)
        with pytest.raises(GarbledError):
            await child.receive(LONG_S, max_bytes=1 << 20)

    with_child(use)


def test_a_reply_that_nobody_asked_for_is_seen() -> None:
    async def use(child: Child) -> None:
        assert await child.call("echo", b"x", LONG_S) == b"x"
        assert not child.has_sent_more
        assert await child.call("twice", b"y", LONG_S) == b"y"
        assert await child.receive(LONG_S) == b"y"

    with_child(use)


def test_a_child_is_killed_with_all_that_it_started() -> None:
    async def use(child: Child) -> None:
        daemon = int(await child.call("leave_daemon", b"", LONG_S))
        assert is_alive(daemon)
        await child.bury()
        until_gone(child.pid, daemon)

    with_child(use)


def test_closing_leaves_no_process() -> None:
    async def use(child: Child) -> list[int]:
        return [child.pid, int(await child.call("leave_daemon", b"", LONG_S))]

    until_gone(*with_child(use))


def test_a_server_that_died_takes_its_children_along_and_is_replaced() -> None:
    async def run() -> None:
        with closing(server()) as forks:
            child = await forks.fork()
            assert forks.pid is not None
            os.kill(forks.pid, signal.SIGKILL)
            with pytest.raises(DiedError):
                await child.call("sleep", b"", LONG_S)
            until_gone(child.pid)
            with closing(await forks.fork()) as replacement:
                assert (await about(replacement))["count"] == 1

    asyncio.run(run())


@pytest.mark.parametrize("is_shared", [True, False])
def test_an_object_that_cannot_be_made_is_told(is_shared: bool) -> None:
    with pytest.raises(StartError if is_shared else CallError, match="ValueError: it cannot be made"):
        with_child(about, name="broken", is_shared=is_shared)


def test_a_fork_that_nobody_waits_for_leaves_no_child() -> None:
    async def run() -> set[int]:
        with closing(server()) as forks:
            await forks.start()
            task = asyncio.ensure_future(forks.fork())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with closing(await forks.fork()) as child:  # the next answer is the next question's
                assert (await about(child))["pid"] == child.pid
                until_gone(*children_of(forks.pid) - {child.pid})
                return {child.pid}

    until_gone(*asyncio.run(run()))


def children_of(pid: int | None) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


DRIVER = """
import asyncio, os, sys
from pathlib import Path
from tests.remote.test_fork_server import server

async def main():
    forks = server(leftovers=[Path(sys.argv[1])])
    child = await forks.fork()
    await forks.remember(Path(sys.argv[2]))
    daemon = int(await child.call("leave_daemon", b"", 60))
    print(forks.pid, child.pid, daemon, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_killed_driver_leaves_neither_processes_nor_files(tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("x")
    (folder / "inner").mkdir(parents=True)
    command = [sys.executable, "-c", DRIVER, str(file), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 3
        driver.kill()
    until_gone(*pids)
    assert not file.exists()
    assert not folder.exists()


def test_a_driver_that_closes_keeps_its_files(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with_child(about, leftovers=[file])
    assert file.exists()


def test_a_caller_may_wait_in_its_own_thread() -> None:
    child = BlockingChild(server())
    try:
        found: list[bytes] = []
        thread = threading.Thread(target=lambda: found.append(child.call("echo", b"x", LONG_S)))
        thread.start()
        thread.join()
        assert found == [b"x"]
        pid = json.loads(child.call("about", b"", LONG_S))["pid"]
    finally:
        child.close()
    until_gone(pid)
