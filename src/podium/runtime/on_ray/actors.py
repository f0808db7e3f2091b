"""Actors of one kind: started before the run, found again by a later driver, or started to replace a lost one."""

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from podium.errors import PodiumError
from podium.runtime.on_ray.calls import DriverContext, Handle, declared, messages, named
from podium.runtime.on_ray.cluster import Cluster

MOMENT_S, MOMENTS = 0.05, 20
RETURN_S = 20.0
"""For workers of a former driver to report what they hold."""


@dataclass
class ActorGroup:
    """`name` also names the replicas in a pool: "rollout" for rollout-1, rollout-2, …"""

    cluster: Cluster
    name: str
    cls: type
    arguments: tuple[Any, ...]
    resources: Mapping[str, float]
    group: Any
    """Their placement group, with a bundle for each of the first `num_bundles` replicas."""
    num_bundles: int
    can_return: bool
    """Whether a later driver may find them."""
    ready: list[tuple[Handle, dict[str, Any]]] = field(default_factory=list)
    """Started and not yet taken, with what they reported."""
    untaken: list[Handle] = field(default_factory=list)
    """Started or starting, and not yet taken, so no pool pings them."""
    started: list[Handle] = field(default_factory=list)
    """All that were started, in that order, including dead ones."""

    def start_ahead(self, number: int, *more: Any) -> Handle:
        actor = self.start(number, *more)
        self.untaken.append(actor)
        return actor

    def start(self, number: int, *more: Any) -> Handle:
        """A new actor for replica `number`, from 1; beyond the reserved bundles Ray puts it where there is room."""
        asked: dict[str, Any] = {"num_cpus": self.resources["CPU"], "num_gpus": self.resources.get("GPU", 0)}
        if number <= self.num_bundles:
            asked["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self.group)
        driver = self.cluster.driver
        if not self.can_return:
            driver = replace(driver, linger_s=None)  # Ray ends it with the driver
        elif not self.cluster.is_own:
            name = f"{self.name}-{number}-{secrets.token_hex(4)}"
            asked |= {"name": name, "namespace": self.cluster.namespace, "lifetime": "detached"}
        kinds, _ = declared(self.cls.open)  # type: ignore[attr-defined]
        given = messages((DriverContext, *kinds), (driver, *self.arguments, *more))
        handle = Handle(ray.remote(self.cls).options(**asked).remote(*given), self.cls)
        self.started.append(handle)
        return handle

    def adopt(self, given: Mapping[str, Any] | None) -> None:
        """Takes over the actors of a former driver of this run that hold what was `given`, and ends the others."""
        left = [actor for name in self._names() if (actor := _find(name, self.cluster.namespace)) is not None]
        found = [Handle(actor, self.cls) for actor in left]
        self.started += found
        calls = [actor.call("start") for actor in found]
        if calls:
            ray.wait([call.ref for call in calls], num_returns=len(calls), timeout=RETURN_S)
        for actor, call in zip(found, calls, strict=True):
            about: Any = None
            with suppress(PodiumError), named(self.name):
                about = call.result(0.0)
            if about is not None and about.get("given") == given and len(self.ready) < self.num_bundles:
                self.ready.append((actor, about))
                self.untaken.append(actor)
            else:
                end(actor, None)

    async def take(self, name: str) -> tuple[Handle, dict[str, Any]]:
        """An actor that is ready, or a new one once it has started. `name` is a member's: rollout-2.3 is the third
        member of replica 2."""
        if self.ready:
            actor, about = self.ready.pop(0)
            self.untaken.remove(actor)
            return actor, about
        actor = self.start(int(name.partition(".")[0].rpartition("-")[2]))
        try:
            with named(name):
                return actor, await actor.call("start")
        except BaseException:
            end(actor, None)
            raise

    def close(self) -> None:
        """Ends them all, the last one first."""
        for actor in reversed(self.started):
            end(actor, None)
        self.started.clear()
        self.untaken.clear()

    def _names(self) -> list[str]:
        listed: Any = ray.util.list_named_actors(all_namespaces=True)
        ours = [each["name"] for each in listed if each["namespace"] == self.cluster.namespace]
        return sorted(name for name in ours if name.startswith(f"{self.name}-"))


class ActorWorker:
    """The driver's end of an actor: what a pool asks of a worker besides its work (remote/pool.py)."""

    def __init__(self, name: str, actor: Handle, about: Mapping[str, Any]) -> None:
        self.name, self.actor = name, actor
        self.pid: int | None = about["pid"]
        self._is_here = about["node"] == os.uname().nodename

    async def ping(self) -> None:
        with named(self.name):
            await self.actor.call("ping")

    async def exited(self) -> str:
        """Waits for the actor's end and says why. A process's end is known at once, a machine's when Ray knows it."""
        try:
            with named(self.name):
                await self.actor.call("stay")
        except PodiumError as error:
            return str(error)
        return "it left"

    async def end(self) -> None:
        await asyncio.to_thread(end, self.actor, self.pid if self._is_here else None)


def end(actor: Handle, pid: int | None) -> None:
    """Kills the actor. Ray gives a frozen process some seconds; on this machine `pid` is killed after one second."""
    with suppress(Exception):  # the actor or the whole cluster is gone already
        ray.kill(actor.actor)
    if pid is not None:
        _kill_if_it_stays(pid)


def _kill_if_it_stays(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        for _ in range(MOMENTS):
            time.sleep(MOMENT_S)
            os.kill(pid, 0)
        os.kill(pid, signal.SIGKILL)


def _find(name: str, namespace: str) -> Any:
    with suppress(ValueError):  # gone since
        return ray.get_actor(name, namespace=namespace)
    return None
