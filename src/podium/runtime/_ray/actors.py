"""Actors of one kind: started ahead of the run, found again after a driver's death, or put into a dead one's place."""

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
from podium.runtime._ray.calls import named
from podium.runtime._ray.cluster import Cluster

MOMENT_S, MOMENTS = 0.05, 20
RETURN_S = 20.0
"""For workers that a former driver left, to say what they hold."""


@dataclass
class Actors:
    """`name` is also that of their seats in a pool: "rollout" for rollout-1, rollout-2, …"""

    cluster: Cluster
    name: str
    cls: type
    arguments: tuple[Any, ...]
    resources: Mapping[str, float]
    group: Any
    """Their placement group, with a bundle for each of the first `num_bundles` seats."""
    num_bundles: int
    can_return: bool
    """Whether a later driver may find them."""
    ready: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    """Started ahead, with what they said of themselves."""
    unseated: list[Any] = field(default_factory=list)
    """Those that nobody has taken yet; the pool's heartbeat does not reach them."""
    started: list[Any] = field(default_factory=list)
    """Every one, in the order of starting; those that are gone too."""

    def start_ahead(self, seat: int, *more: Any) -> Any:
        actor = self.start(seat, *more)
        self.unseated.append(actor)
        return actor

    def start(self, seat: int, *more: Any) -> Any:
        """A new actor for a seat, counted from 1; one beyond the reserved places goes where there is room."""
        asked: dict[str, Any] = {"num_cpus": self.resources["CPU"], "num_gpus": self.resources.get("GPU", 0)}
        if seat <= self.num_bundles:
            asked["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self.group)
        place = self.cluster.place
        if not self.can_return:
            place = replace(place, linger_s=None)  # Ray ends it with the driver
        elif not self.cluster.is_own:
            name = f"{self.name}-{seat}-{secrets.token_hex(4)}"
            asked |= {"name": name, "namespace": self.cluster.namespace, "lifetime": "detached"}
        actor = ray.remote(self.cls).options(**asked).remote(place, *self.arguments, *more)
        self.started.append(actor)
        return actor

    def adopt(self, given: Mapping[str, Any] | None) -> None:
        """Those that a former driver of this run left behind, if they hold what was `given`; the others end."""
        found = [actor for name in self._names() if (actor := _find(name, self.cluster.namespace)) is not None]
        self.started += found
        calls = [actor.start.remote() for actor in found]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=RETURN_S)
        for actor, call in zip(found, calls, strict=True):
            about: Any = None
            with suppress(PodiumError), named(self.name):
                about = ray.get(call, timeout=0.0)
            if about is not None and about.get("given") == given and len(self.ready) < self.num_bundles:
                self.ready.append((actor, about))
                self.unseated.append(actor)
            else:
                end(actor, None)

    async def take(self, seat_name: str) -> tuple[Any, dict[str, Any]]:
        """One that is ready, or a new one for the seat (`rollout-2.3`: the third on seat 2), once it has started."""
        if self.ready:
            actor, about = self.ready.pop(0)
            self.unseated.remove(actor)
            return actor, about
        actor = self.start(int(seat_name.partition(".")[0].rpartition("-")[2]))
        try:
            with named(seat_name):
                return actor, await actor.start.remote()
        except BaseException:
            end(actor, None)
            raise

    def close(self) -> None:
        """Ends them all, the last one first."""
        for actor in reversed(self.started):
            end(actor, None)
        self.started.clear()
        self.unseated.clear()

    def _names(self) -> list[str]:
        listed: Any = ray.util.list_named_actors(all_namespaces=True)
        ours = [each["name"] for each in listed if each["namespace"] == self.cluster.namespace]
        return sorted(name for name in ours if name.startswith(f"{self.name}-"))


class Member:
    """The driver's end of an actor in service: what a pool asks of a worker beside its work."""

    def __init__(self, name: str, actor: Any, about: Mapping[str, Any]) -> None:
        self.name, self.actor = name, actor
        self.pid: int | None = about["pid"]
        self._is_here = about["node"] == os.uname().nodename

    async def ping(self) -> None:
        with named(self.name):
            await self.actor.ping.remote()

    async def exited(self) -> str:
        """How it ended; a process's end is told at once, a machine's as soon as Ray knows."""
        try:
            with named(self.name):
                await self.actor.stay.remote()
        except PodiumError as error:
            return str(error)
        return "it left"

    async def end(self) -> None:
        await asyncio.to_thread(end, self.actor, self.pid if self._is_here else None)


def end(actor: Any, pid: int | None) -> None:
    """Kills it. Ray gives a frozen process some seconds, one on this machine gets a moment."""
    with suppress(Exception):  # it, or the whole cluster, is gone already
        ray.kill(actor)
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
