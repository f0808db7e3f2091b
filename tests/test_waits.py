"""G6, S5: no wait without a limit, and no limit by a clock that may be set."""

import ast
from pathlib import Path

import pytest

import podium

ROOT = Path(podium.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

WAITS = {
    *("wait", "join", "result", "get", "acquire", "communicate"),
    *("recv", "recvfrom", "recvmsg", "accept", "sock_recv"),
}
"""Methods that may wait for ever when they are given no limit."""

ALLOWED = {
    "reward/scoring/stage.py: pending.popleft().result()": "the task is done",
    "flights.py: task.result()": "the task is done",
    "observer.py: queue.get()": "the loop's own wait for groups, which the watchdog limits",
    "model/device_thread.py: made.get()": "the loop's own wait for groups, which the watchdog limits",
    "runtime/ranks/__init__.py: writing.result()": "the work is done",
    "tool/mcp.py: closing.wait()": "until the episode ends",
    "remote/engine_pool.py: arrived.get()": "the loop's own wait for groups, which the watchdog limits",
    "engine/vllm_server.py: thread.submit(": "the call has a limit",
    "server/served.py: ready.get()": "the task that fills the queue puts itself into it when it ends",
    "engine/cuda/captured.py: copy.wait()": "for the device; the watchdog limits it",
    "engine/cuda/captured.py: look.wait()": "for the device; the watchdog limits it",
    "engine/cuda/captured.py: seat.written.wait()": "for the device; the watchdog limits it",
    "remote/pool.py: sign.result()": "the task is done",
    "remote/tasks.py: self._next.wait()": "a pool fails within its limits, and a call waits for the calls before it",
    "remote/pool.py: task.result()": "the task is done",
    "remote/pool.py: self.lost.result()": "the future is done",
    "remote/fork_server.py: self._process.wait()": "after SIGKILL",
    "remote/fork_server.py: self._socket.recv(CHUNK)": "the socket does not block",
    "remote/fork_server.py: control.recv(CHUNK)": "the socket does not block",
    "remote/fork_server.py: self._thread.start(": "the call has a limit",
    "runtime/ranks/launch.py: process.wait()": "the launcher stays as long as its ranks, which have their own limits",
    "runtime/flyte.py: current.get()": "a context variable",
    "runtime/on_flyte/driver.py: run.wait()": "for a run on a cluster, which the driver's own watchdog limits",
    "runtime/on_flyte/stages.py: sent.result()": "for a task; the watchdog limits it",
    "runtime/ranks/__init__.py: dist.recv(": "the group has a timeout",
    "report/_tracker.py: self._calls.get()": "a daemon thread without work",
    "reward/scoring/verifiers.py: _current.get()": "a context variable",
    "observer.py: coming.result()": "the task is done",
    "reward/sandbox/__init__.py: process.wait()": "after SIGKILL to its process group",
    "reward/judge.py: process.wait()": "after SIGKILL",
}
"""Calls that need none, and why."""


def unlimited(path: Path) -> list[str]:
    """Calls of waits without a limit, outside of a `with` that sets one."""
    tree = ast.parse(path.read_text())
    limited: set[ast.AST] = set()
    for node in ast.walk(tree):
        is_limit = isinstance(node, (ast.With, ast.AsyncWith)) and any(
            "timeout" in ast.unparse(item.context_expr) for item in node.items
        )
        is_wait_for = isinstance(node, ast.Call) and ast.unparse(node.func) == "asyncio.wait_for"
        limited |= set(ast.walk(node)) if is_limit or is_wait_for else set()
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node in limited:
            continue
        takes_data = node.func.attr in ("recv", "recvfrom", "recvmsg", "sock_recv", "communicate")
        is_bare = takes_data or (not node.args and not node.keywords)
        if node.func.attr in WAITS and is_bare and not any(k.arg == "timeout" for k in node.keywords):
            found.append(f"{path.relative_to(ROOT)}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_g6_every_wait_has_a_limit(path: Path) -> None:
    if (
        path.parent != ROOT / "reward" / "sandbox" / "inside"
    ):  # programs in the sandbox are timed and killed from outside
        assert [call for call in unlimited(path) if not call.startswith(tuple(ALLOWED))] == []


def test_every_exception_is_still_there() -> None:
    found = [call for path in MODULES for call in unlimited(path)]
    assert [name for name in ALLOWED if not any(call.startswith(name) for call in found)] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_s5_only_labels_are_made_of_the_wall_clock(path: Path) -> None:
    """`time.time` may jump; what waits or orders goes by `time.monotonic` and by steps."""
    uses = [ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    labels = {"folder.py": 2, "reader.py": 1, "mlflow.py": 1, "openai.py": 2}  # what people read
    assert uses.count("time.time()") <= labels.get(path.name, 0)
