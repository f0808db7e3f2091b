"""The processes that rewards run in: a template that has imported them, and the workers that it forks.

The template is a fresh interpreter without torch, so a worker starts in milliseconds and a killed one is replaced at
once. Each worker leads a process group of its own, has limits set by the kernel and dies with the template; what a
reward leaves behind (a daemon that outlived its worker) falls to the template, which kills it. When the driver is
gone, all of them go.
"""

import asyncio
import json
import os
import random
import resource
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from podium.errors import RewardContractError
from podium.lookup import find, validate_options
from podium.processes import adopt_orphans, bury, die_with_parent, kill_strays, outlive_parent
from podium.reward._calls import call_reward
from podium.reward._classes import Normalised, bound_reward
from podium.reward._contract import Style, style_of
from podium.reward._inside._limits import hide_from_others
from podium.reward._messages import OUT_OF_MEMORY, Failed, Outcome, decode, encode_outcome
from podium.terminal import warn

MAX_FILE_BYTES = 1 << 30
MAX_OPEN_FILES = 512
MAX_MORE_TASKS = 1024
"""Processes and threads that the user may have beyond those there were at the start; the kernel exempts root."""


@dataclass(frozen=True)
class Loaded:
    """A reward in a worker."""

    function: Any
    style: Style


def main(given: Mapping[str, Any]) -> None:
    """The template: imports the rewards, says so, then forks and buries workers until the driver is gone."""
    die_with_parent(given["driver"])  # an import may take for ever
    control = socket.socket(fileno=given["control"])
    try:
        rewards = {recipe["name"]: _load(recipe) for recipe in given["rewards"]}
    except BaseException as error:  # whatever user code raises while it is imported
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]}).encode())
        return
    outlive_parent()  # from now on it notices by itself, and cleans up
    control.send(b'{"error": null}')
    Template(control, rewards, given["memory_mb"]).serve(given["driver"])


def _load(recipe: Mapping[str, Any]) -> Loaded:
    name = recipe["name"]
    found = find("reward", name)
    function = bound_reward(found, validate_options(f"reward {name!r}", found, recipe["options"]))
    if isinstance(function, Normalised):
        _ = function.instance  # made here, once for all workers
    return Loaded(function, style_of(function))


class Template:
    """Answers the driver: a message with a socket asks for a worker on it, a number for the burial of that worker."""

    def __init__(self, control: socket.socket, rewards: Mapping[str, Loaded], memory_mb: int) -> None:
        self._control, self._rewards, self._memory_mb = control, rewards, memory_mb
        self._max_tasks = _tasks_of_user() + MAX_MORE_TASKS
        self._workers: set[int] = set()

    def serve(self, driver: int) -> None:
        adopt_orphans()
        self._control.settimeout(1.0)  # the socket may have been inherited by another child of a driver that is gone
        while os.getppid() == driver:
            try:
                message, descriptors, _, _ = socket.recv_fds(self._control, 64, 1)
            except TimeoutError:
                continue
            if descriptors:
                self._fork(descriptors[0])
            elif message:
                self._control.send(json.dumps([int(message), self._bury(int(message))]).encode())
            else:
                break
        for worker in list(self._workers):
            self._bury(worker)
        kill_strays(self._workers)

    def _fork(self, descriptor: int) -> None:
        template = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # no room for one more: the driver sees the socket closed and tries again
            warn(f"podium: cannot fork a reward worker: {error}")
            pid = -1
        if pid == 0:
            try:
                self._control.close()
                die_with_parent(template)
                os.setsid()
                self._limit()
                hide_from_others()  # a program in the weak sandbox runs beside this process
                Worker(descriptor, self._rewards).serve()
            finally:
                os._exit(1)
        os.close(descriptor)
        if pid > 0:
            self._workers.add(pid)

    def _limit(self) -> None:
        """Address space is on top of what the imported rewards take already."""
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
        limits = {
            resource.RLIMIT_AS: used + (self._memory_mb << 20),
            resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
            resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
            resource.RLIMIT_NPROC: self._max_tasks,
            resource.RLIMIT_CORE: 0,
        }
        for kind, limit in limits.items():
            _, hard = resource.getrlimit(kind)
            least = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (least, least))

    def _bury(self, worker: int) -> int:
        """Kills the worker's group and what escaped from it; its exit status, negative for a signal."""
        if worker not in self._workers:
            return 0
        self._workers.discard(worker)
        return bury(worker, self._workers)


class Worker:
    """Takes a task, calls the reward, writes a line a rollout, and so on until the driver's end is closed."""

    def __init__(self, descriptor: int, rewards: Mapping[str, Loaded]) -> None:
        self._descriptor, self._rewards = descriptor, rewards
        self._pid = os.getpid()

    def serve(self) -> None:
        os.set_blocking(self._descriptor, True)
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        self._write(json.dumps(self._pid).encode() + b"\n")
        while True:
            task, prompt, rollouts = decode(self._read)
            reward = self._rewards[task.reward]
            random.seed(task.seed)  # what a reward draws does not depend on which worker it runs in
            _limit_processor_time(task.limit_s * len(task.indices))
            chosen = {index: rollouts[index] for index in task.indices}
            limit_s = task.limit_s if reward.style == "together" else None
            calls = call_reward(task.reward, reward.function, reward.style, prompt, chosen, self._report, limit_s)
            try:
                loop.run_until_complete(calls)
            except RewardContractError as breach:
                self._write(encode_outcome(task.indices[0], breach))

    def _report(self, index: int, outcome: Outcome) -> None:
        if os.getpid() != self._pid:  # the reward forked, and the child returned as well
            os._exit(1)
        if isinstance(outcome, Failed) and outcome.reason.startswith("MemoryError"):
            os._exit(OUT_OF_MEMORY)  # perhaps calls before this one filled it: a fresh worker tells
        self._write(encode_outcome(index, outcome))

    def _read(self, count: int) -> bytes:
        chunks = []
        while count:
            chunk = os.read(self._descriptor, count)
            if not chunk:  # the driver is done with this worker
                os._exit(0)
            chunks.append(chunk)
            count -= len(chunk)
        return b"".join(chunks)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]


def _limit_processor_time(seconds: float) -> None:
    """The kernel ends a busy reward even where the driver is too busy to; waiting ones are the driver's to end."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime + seconds) + 2
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _tasks_of_user() -> int:
    """Processes and threads that the kernel counts against this user."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # gone in the meantime
            continue
    return count
