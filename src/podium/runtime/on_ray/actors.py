"""Actors of a run and calls to them: `RunActor` is the actor's end, `Handle` the driver's, `ActorGroup` all of a kind.

Arguments and results travel as bytes of the codec, by the types that the method declares; Ray pickles nothing but
exceptions. Every failure becomes a Podium error: the one that the actor raised, or that the actor is gone. An actor
finds the driver's code, answers pings, and ends when it has no driver. Imports no torch.
"""

import asyncio
import inspect
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, ClassVar

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util import get_current_placement_group, list_named_actors, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from podium.errors import EngineError, InputError, PodiumError, ProvisionError
from podium.remote.codec import decode, encode
from podium.runtime.on_ray import Cluster, DriverContext

LARGE = 1 << 20
"""A message of this many bytes is sent as an array, which the object store passes on without a copy."""
LOOK_S = 1.0
"""Between two looks at when the driver last pinged."""
RETURN_S = 20.0
"""For workers of a former driver to report what they hold."""
MOMENT_S, MOMENTS = 0.05, 20
"""How often, and how many times, to look whether a process that Ray has killed is gone."""


@cache
def _declared(method: Callable[..., Any]) -> tuple[tuple[Any, ...], Any]:
    """The types of a method's arguments and of its result; of an iterator's items."""
    hints = typing.get_type_hints(method)
    result = hints.pop("return")
    is_stream = typing.get_origin(result) is AsyncIterator
    return tuple(hints.values()), typing.get_args(result)[0] if is_stream else result


def _to_message(value: Any, kind: Any) -> Any:
    content = encode(value, kind)
    return content if len(content) < LARGE else np.frombuffer(content, dtype=np.uint8)


def _messages(kinds: tuple[Any, ...], arguments: tuple[Any, ...]) -> list[Any]:
    pairs = zip(arguments, kinds, strict=False)  # the last arguments may have defaults
    return [value.ref if isinstance(value, Call) else _to_message(value, kind) for value, kind in pairs]


class RunActor:
    """A kind of actor declares in `open` what it is started with. Drivers call its other methods by `call`, which runs
    methods that are no coroutines in a thread, and by `stream`."""

    def __init__(self, context: Any, *arguments: Any) -> None:
        driver = decode(DriverContext, context)
        if os.path.isdir(driver.cwd):
            os.chdir(driver.cwd)
        sys.path += [entry for entry in driver.path if entry not in sys.path and os.path.exists(entry)]
        if driver.scratch is not None:
            os.environ["TMPDIR"] = driver.scratch
            tempfile.tempdir = None  # looked up again
        self._last_ping, self._is_loading = time.monotonic(), False
        if driver.linger_s is not None:
            threading.Thread(target=self._end_without_driver, args=(driver.linger_s,), daemon=True).start()
        self.open(*map(decode, _declared(type(self).open)[0], arguments))

    def open(self) -> None:
        """For a kind that is started with nothing."""

    async def call(self, name: str, *arguments: Any) -> Any:
        method = getattr(self, name)
        kinds, result = _declared(method)
        given = map(decode, kinds, arguments)
        is_async = inspect.iscoroutinefunction(method)
        return _to_message(await (method(*given) if is_async else asyncio.to_thread(method, *given)), result)

    async def stream(self, name: str, *arguments: Any) -> AsyncIterator[Any]:
        method = getattr(self, name)
        kinds, item = _declared(method)
        async with aclosing(method(*map(decode, kinds, arguments))) as found:
            async for each in found:
                yield _to_message(each, item)

    async def ping(self) -> None:
        self._last_ping = time.monotonic()

    async def stay(self) -> None:
        """Never returns: a caller that waits for it learns of the actor's death."""
        await asyncio.get_running_loop().create_future()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """An actor that is loading does not end, however long loading takes."""
        self._is_loading = True
        try:
            yield
        finally:
            self._is_loading, self._last_ping = False, time.monotonic()

    def about(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "node": os.uname().nodename}

    def _end_without_driver(self, limit_s: float) -> None:
        while self._is_loading or time.monotonic() - self._last_ping < limit_s:
            time.sleep(LOOK_S)
        with suppress(Exception):  # the cluster may be gone
            if (group := get_current_placement_group()) is not None:  # an actor outside the reserved places has none
                remove_placement_group(group)
        os._exit(0)


@dataclass(eq=False)
class Handle:
    """The driver's end of an actor: calls to it, and what a pool asks of a worker besides its work (remote/pool.py). A
    subclass says of which class the actor is."""

    kind: ClassVar[type]
    lost: ClassVar[type[PodiumError]] = EngineError
    """Raised where the actor is gone, or fails with an error that is not Podium's."""
    actor: Any
    name: str = "it"
    """In messages."""
    about: Any = None
    """What the actor reported once it had started."""
    pid: int | None = None
    is_over: bool = False
    """Whether it was ended from here."""

    def note(self, about: Mapping[str, Any]) -> None:
        self.about, self.pid = about, about["pid"]

    def call(self, name: str, *arguments: Any) -> "Call":
        kinds, result = _declared(getattr(self.kind, name))
        return Call(self.actor.call.remote(name, *_messages(kinds, arguments)), result, self)

    async def stream(self, name: str, *arguments: Any) -> AsyncGenerator[Any]:
        """The items of an iterator, each as soon as it is there; closing this one cancels the call."""
        kinds, item = _declared(getattr(self.kind, name))
        coming = self.actor.stream.options(num_returns="streaming").remote(name, *_messages(kinds, arguments))
        is_over = False
        try:
            with failures_named(self.name, self.lost):
                async for ref in coming:
                    yield decode(item, await ref)
            is_over = True
        finally:
            if not is_over:
                ray.cancel(coming)

    async def ping(self) -> None:
        await self.call("ping")

    async def exited(self) -> str:
        """Waits for the actor's end and says why. A process's end is known at once, a machine's when Ray knows it."""
        try:
            await self.call("stay")
        except PodiumError as error:
            return str(error)
        return "it left"

    async def end(self) -> None:
        await asyncio.to_thread(self._kill_surely)

    def kill(self) -> None:
        self.is_over = True
        with suppress(Exception):  # the actor or the whole cluster is gone already
            ray.kill(self.actor)

    def _kill_surely(self) -> None:
        """Ray gives a frozen process some seconds; one on this machine is killed after one."""
        self.kill()
        if self.pid is not None and self.about["node"] == os.uname().nodename:
            with suppress(ProcessLookupError, PermissionError):
                for _ in range(MOMENTS):
                    time.sleep(MOMENT_S)
                    os.kill(self.pid, 0)
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Call:
    """A call under way: `await` it, or ask for its `result`. As an argument of another call, its result travels through
    the object store without passing the driver."""

    ref: Any
    kind: Any
    handle: Handle

    def __await__(self) -> Generator[Any, None, Any]:
        with failures_named(self.handle.name, self.handle.lost):
            content = yield from self.ref.__await__()
        return decode(self.kind, content)

    def result(self, limit_s: float) -> Any:
        with failures_named(self.handle.name, self.handle.lost):
            content = ray.get(self.ref, timeout=limit_s)
        return decode(self.kind, content)


@dataclass(eq=False)
class ActorGroup:
    """Actors of one kind: started before the run, found again by a later driver, or started to replace a lost one.
    `name` also names the replicas in a pool: "rollout" for rollout-1, rollout-2, …"""

    cluster: Cluster
    cpus: float
    name: str
    handle: type[Handle]
    arguments: tuple[Any, ...]
    gpus: float
    count: int
    """Places that are reserved, for the first replicas."""
    can_return: bool
    """Whether a later driver may find them."""
    ready: list[Handle] = field(default_factory=list)
    """Started and not yet taken."""
    started: list[Handle] = field(default_factory=list)
    """All that were started, in that order, including dead ones."""

    def __post_init__(self) -> None:
        resources = {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})
        self.places = self.cluster.reserve(self.name, [resources] * self.count, self.can_return)

    def start(self, number: int) -> Handle:
        """A new actor for replica `number`, from 1; beyond the reserved places Ray puts it where there is room."""
        asked: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus}
        if number <= self.count:
            asked["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self.places)
        driver = self.cluster.driver
        if not self.can_return:
            driver = replace(driver, linger_s=None)  # Ray ends it with the driver
        elif not self.cluster.is_own:
            name = f"{self.name}-{number}-{secrets.token_hex(4)}"
            asked |= {"name": name, "namespace": self.cluster.namespace, "lifetime": "detached"}
        kind: Any = self.handle.kind
        given = _messages((DriverContext, *_declared(kind.open)[0]), (driver, *self.arguments))
        self.started.append(self.handle(ray.remote(kind).options(**asked).remote(*given)))
        return self.started[-1]

    def adopt(self, given: Mapping[str, Any] | None) -> None:
        """Takes over the actors of a former driver of this run that hold what was `given`, and ends the others."""
        namespace, found = self.cluster.namespace, list[Handle]()
        listed: Any = list_named_actors(all_namespaces=True)
        for name in sorted(each["name"] for each in listed if each["namespace"] == namespace):
            with suppress(ValueError):  # gone since
                if name.startswith(f"{self.name}-"):
                    found.append(self.handle(ray.get_actor(name, namespace=namespace)))
        self.started += found
        calls = [actor.call("start") for actor in found]
        if calls:
            ray.wait([call.ref for call in calls], num_returns=len(calls), timeout=RETURN_S)
        for actor, call in zip(found, calls, strict=True):
            with suppress(PodiumError):
                actor.note(call.result(0.0))
            if actor.about is not None and actor.about.get("given") == given and len(self.ready) < self.count:
                self.ready.append(actor)
            else:
                actor.kill()

    async def take(self, name: str) -> Handle:
        """An actor that is ready, or a new one once it has started, for the member of that name: rollout-2.3 is the
        third member of replica 2."""
        actor = self.ready.pop(0) if self.ready else self.start(int(name.partition(".")[0].rpartition("-")[2]))
        actor.name = name
        try:
            if actor.about is None:
                actor.note(await actor.call("start"))
        except BaseException:
            actor.kill()
            raise
        return actor

    def close(self) -> None:
        """Ends them all, the last one first."""
        for actor in reversed(self.started):
            actor.kill()
        self.started.clear()


@contextmanager
def failures_named(who: str, lost: type[PodiumError]) -> Iterator[None]:
    """Turns Ray's errors into Podium's: the one that the actor raised, or `lost`."""
    try:
        yield
    except (RayTaskError, RayActorError) as error:
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, PodiumError):
            raise cause from None
        if isinstance(cause, RayActorError):
            raise lost(f"{who} is gone: {_how(cause)}") from None
        raise lost(f"{who} failed: {type(cause).__name__}: {_first_line(cause)}") from None
    except GetTimeoutError:
        raise lost(f"{who} did not answer in time") from None
    except RayError as error:
        raise lost(f"{who}: {type(error).__name__}: {_first_line(error)}") from None


def _how(error: RayActorError) -> str:
    """Ray's own message on how the actor ended, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("The actor")]
    return (reasons or lines or ["no reason given"])[-1][:300]


def _first_line(error: BaseException | None) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def results(calls: Mapping[str, Call], limit_s: float) -> dict[str, Any]:
    """What each call returned, by name; if some failed, one error that lists all of them."""
    ray.wait([call.ref for call in calls.values()], num_returns=len(calls), timeout=limit_s)
    attempts = {name: partial(call.result, 0.0) for name, call in calls.items()}
    return all_of(attempts, "workers could not be made ready")


def all_of(attempts: Mapping[str, Callable[[], Any]], problem: str) -> dict[str, Any]:
    """What each attempt returns, by name. If some fail, one error for all: an `InputError` if each of them is one.
    Names with the same message are listed together."""
    found: dict[str, Any] = {}
    errors: list[PodiumError] = []
    by_text: dict[str, list[str]] = {}
    for name, attempt in attempts.items():
        try:
            with failures_named("it", ProvisionError):
                found[name] = attempt()
        except PodiumError as error:
            errors.append(error)
            by_text.setdefault(str(error), []).append(name)
    if errors:
        listed = "\n".join(f"  {', '.join(names)}: {text}" for text, names in by_text.items())
        kind = InputError if all(isinstance(error, InputError) for error in errors) else ProvisionError
        raise kind(f"{len(errors)} of {len(attempts)} {problem}:\n{listed}")
    return found
