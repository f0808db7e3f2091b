"""Actors of a run and calls to them: `RunActor` is the actor's end, `Handle` the driver's.

Arguments and results travel as bytes of the codec, by the types that the method declares; Ray pickles nothing but
exceptions. Every failure becomes a Podium error: the one that the actor raised, or that the actor is gone. An actor
finds the driver's code, answers pings, and ends when it has no driver. Imports no torch.
"""

import asyncio
import os
import sys
import tempfile
import threading
import time
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from podium.errors import EngineError, InputError, PodiumError, ProvisionError
from podium.remote.codec import decode, encode

LARGE = 1 << 20
"""A message of this many bytes is sent as an array, which the object store passes on without a copy."""
LOOK_S = 1.0
"""Between two looks at when the driver last pinged."""


@cache
def declared(method: Callable[..., Any]) -> tuple[tuple[Any, ...], Any]:
    """The types of a method's arguments and of its result; of an iterator's items."""
    hints = typing.get_type_hints(method)
    result = hints.pop("return")
    is_stream = typing.get_origin(result) is AsyncIterator
    return tuple(hints.values()), typing.get_args(result)[0] if is_stream else result


def to_message(value: Any, kind: Any) -> Any:
    content = encode(value, kind)
    return content if len(content) < LARGE else np.frombuffer(content, dtype=np.uint8)


@dataclass(frozen=True)
class DriverContext:
    """Where the driver runs, so that actors find the code and files that it finds."""

    cwd: str
    path: tuple[str, ...]
    scratch: str | None
    """Folder for temporary files, removed with the cluster; None: the system's folder."""
    linger_s: float | None
    """Seconds without a ping from a driver after which an actor ends; None: Ray ends it with the driver."""


class RunActor:
    """A kind of actor declares in `open` what it is started with. Drivers call its other methods by `call` and
    `stream`."""

    def __init__(self, context: Any, *arguments: Any) -> None:
        driver = decode(DriverContext, context)
        if os.path.isdir(driver.cwd):
            os.chdir(driver.cwd)
        sys.path += [entry for entry in driver.path if entry not in sys.path and os.path.exists(entry)]
        if driver.scratch is not None:
            os.environ["TMPDIR"] = driver.scratch
            tempfile.tempdir = None  # looked up again
        self._last_ping, self._num_loading = time.monotonic(), 0
        if driver.linger_s is not None:
            threading.Thread(target=self._end_without_driver, args=(driver.linger_s,), daemon=True).start()
        self.open(*map(decode, declared(type(self).open)[0], arguments))

    def open(self) -> None:
        """For a kind that is started with nothing."""

    async def call(self, name: str, *arguments: Any) -> Any:
        kinds, result = declared(getattr(type(self), name))
        return to_message(await getattr(self, name)(*map(decode, kinds, arguments)), result)

    async def stream(self, name: str, *arguments: Any) -> AsyncIterator[Any]:
        kinds, item = declared(getattr(type(self), name))
        async with aclosing(getattr(self, name)(*map(decode, kinds, arguments))) as found:
            async for each in found:
                yield to_message(each, item)

    async def ping(self) -> None:
        self._last_ping = time.monotonic()

    async def stay(self) -> None:
        """Never returns: a caller that waits for it learns of the actor's death."""
        await asyncio.get_running_loop().create_future()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """An actor that is loading does not end, however long loading takes."""
        self._num_loading += 1
        try:
            yield
        finally:
            self._num_loading -= 1
            self._last_ping = time.monotonic()

    def about(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "node": os.uname().nodename}

    def _end_without_driver(self, limit_s: float) -> None:
        while self._num_loading or time.monotonic() - self._last_ping < limit_s:
            time.sleep(LOOK_S)
        with suppress(Exception):  # the cluster may be gone
            from ray.util import get_current_placement_group, remove_placement_group

            if (group := get_current_placement_group()) is not None:  # an actor outside the reserved places has none
                remove_placement_group(group)
        os._exit(0)


@dataclass(frozen=True)
class Call:
    """A call under way: `await` it, or ask for its `result`. As an argument of another call, its result travels through
    the object store without passing the driver."""

    ref: Any
    kind: Any

    def __await__(self) -> Generator[Any, None, Any]:
        content = yield from self.ref.__await__()
        return decode(self.kind, content)

    def result(self, limit_s: float) -> Any:
        return decode(self.kind, ray.get(self.ref, timeout=limit_s))


@dataclass(frozen=True)
class Handle:
    """The driver's end of an actor of class `cls` ."""

    actor: Any
    cls: type

    def call(self, name: str, *arguments: Any) -> Call:
        kinds, result = declared(getattr(self.cls, name))
        return Call(self.actor.call.remote(name, *messages(kinds, arguments)), result)

    async def stream(self, name: str, *arguments: Any) -> AsyncGenerator[Any]:
        """The items of an iterator, each as soon as it is there; closing this one cancels the call."""
        kinds, item = declared(getattr(self.cls, name))
        coming = self.actor.stream.options(num_returns="streaming").remote(name, *messages(kinds, arguments))
        is_over = False
        try:
            async for ref in coming:
                yield decode(item, await ref)
            is_over = True
        finally:
            if not is_over:
                ray.cancel(coming)


def messages(kinds: tuple[Any, ...], arguments: tuple[Any, ...]) -> list[Any]:
    pairs = zip(arguments, kinds, strict=False)  # the last arguments may have defaults
    return [value.ref if isinstance(value, Call) else to_message(value, kind) for value, kind in pairs]


@contextmanager
def named(who: str, lost: type[PodiumError] = EngineError) -> Iterator[None]:
    """Turns Ray's errors into Podium's; `lost` is raised where the actor, or what it held, is gone."""
    try:
        yield
    except RayTaskError as error:
        raise _cause(error, who, lost) from None
    except RayActorError as error:
        raise lost(f"{who} is gone: {_how(error)}") from None
    except GetTimeoutError:
        raise lost(f"{who} did not answer in time") from None
    except RayError as error:
        raise lost(f"{who}: {type(error).__name__}: {_first_line(error)}") from None


def all_of(calls: Mapping[str, Call], limit_s: float) -> dict[str, Any]:
    """What each call returned, by name; if some failed, one error that lists all of them."""
    ray.wait([call.ref for call in calls.values()], num_returns=len(calls), timeout=limit_s)
    found: dict[str, Any] = {}
    problems: dict[str, PodiumError] = {}
    for name, call in calls.items():
        try:
            with named("it", ProvisionError):
                found[name] = call.result(0.0)
        except PodiumError as error:
            problems[name] = error
    if problems:
        raise as_one(problems, len(calls))
    return found


def as_one(problems: Mapping[str, PodiumError], of: int, what: str = "workers could not be made ready") -> PodiumError:
    """One error for all; an `InputError` if each of them is one. Names with the same message are listed together."""
    by_text: dict[str, list[str]] = {}
    for name, error in problems.items():
        by_text.setdefault(str(error), []).append(name)
    listed = "\n".join(f"  {', '.join(names)}: {text}" for text, names in by_text.items())
    kind = InputError if all(isinstance(error, InputError) for error in problems.values()) else ProvisionError
    return kind(f"{len(problems)} of {of} {what}:\n{listed}")


def _cause(error: RayTaskError, who: str, lost: type[PodiumError]) -> PodiumError:
    cause = error.cause
    if isinstance(cause, PodiumError):
        return cause
    if isinstance(cause, RayActorError):
        return lost(f"{who} is gone: {_how(cause)}")
    return lost(f"{who} failed: {type(cause).__name__}: {_first_line(cause)}")


def _how(error: RayActorError) -> str:
    """Ray's own message on how the actor ended, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("The actor")]
    return (reasons or lines or ["no reason given"])[-1][:300]


def _first_line(error: BaseException | None) -> str:
    return (str(error).splitlines() or [""])[0][:300]
