"""The driver's side of tools and environments: what answers a turn of the policy.

    world = World(tools, environment, …)
    async with world.episode(prompt) as episode:        # a worker of its own where state has to be kept
        messages = await episode.begin()
        reply = await episode.answer(text)              # runs the calls in the text, or the environment's step

User code runs in killable processes, with a deadline per call. A tool that fails is an observation that says so. An
environment that fails ends its episode with `EpisodeFailedError`: the rollout abstains.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from podium.environment.episode.calls import MAX_CALLS, Call, CallFormat, instructions
from podium.environment.episode.served import EpisodeRecipe, ToolCall, ToolResult
from podium.errors import PodiumError, ProvisionError
from podium.records import Observation, Prompt
from podium.remote.codec import decode, encode, to_json
from podium.remote.fork_server import CallError, Child, RemoteError, StartError
from podium.remote.workers import Workers

MAX_REPLY = 8 << 20
CLOSE_S = 5.0
CUT = " … (cut)"
SERVED = "podium.environment.episode.served:Served"


@dataclass(frozen=True)
class Playground:
    """The tools and the environment of a run, before any process is started."""

    recipe: EpisodeRecipe
    schemas: tuple[Mapping[str, Any], ...]
    """OpenAI's descriptions of the tools."""
    stateful: frozenset[str]
    """Tools that keep a state over an episode: classes."""
    call_format: CallFormat
    reward: str = "sum"
    """Which of the rewards of an episode's steps count: "sum" or "last"."""

    @property
    def in_template(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the chat template describes; none where the system message does."""
        return self.schemas if self.call_format.in_template else ()

    @cached_property
    def instructions(self) -> str:
        """What the system message says of the tools; empty where the chat template does."""
        return instructions(self.call_format, self.schemas) if self.schemas and not self.call_format.in_template else ""

    def system(self, given: str | None) -> str | None:
        """The system message of a run, with the tools."""
        return "\n\n".join(filter(None, (given, self.instructions))) or None


class EpisodeFailedError(PodiumError):
    """The environment failed. The rollout abstains; it is never a reward of 0."""


@dataclass(frozen=True)
class Reply:
    """What answers one turn of the policy."""

    messages: tuple[Mapping[str, str], ...]
    reward: float | None = None
    """Of the environment's step; None where only tools answered."""
    done: bool = False
    counts: Mapping[str, float] = field(default_factory=dict)


class World:
    """The tools and the environment of a run, in at most `max_processes` processes each: for single calls, for tools
    that keep a state over an episode, and for environments. `tool_role` is the role of a tool's result in the chat
    template."""

    def __init__(
        self,
        playground: Playground,
        tool_role: str,
        *,
        timeout_s: float,
        max_characters: int,
        max_processes: int,
        memory_mb: int,
    ) -> None:
        self.playground, self.tool_role, self.timeout_s = playground, tool_role, timeout_s
        self.has_environment = bool(playground.recipe.environment)
        self._max_characters = max_characters
        functions = [schema["function"] for schema in playground.schemas]
        self._arguments = {each["name"]: list(each["parameters"]["properties"]) for each in functions}
        recipe = {"recipe": to_json(playground.recipe)}
        # Three sets: an episode that waits for a process of one never holds what another needs to go on.
        self._calls, self.tools, self.games = (Workers(SERVED, recipe, max_processes, memory_mb) for _ in range(3))

    @asynccontextmanager
    async def episode(self, prompt: Prompt) -> AsyncIterator["Episode"]:
        """One episode. However it ends, what it started is closed or killed."""
        made = Episode(self, prompt)
        try:
            yield made
        finally:
            await made.close()

    def close(self) -> None:
        """Ends every process."""
        for workers in (self._calls, self.tools, self.games):
            workers.close()

    def parsed(self, text: str) -> list[Call]:
        """The calls in a turn; one that cannot be executed says why."""
        found = self.playground.call_format.calls(text) if self._arguments else []
        return [self._checked(each, place) for place, each in enumerate(found)]

    def _checked(self, call: Call, place: int) -> Call:
        if call.fault:
            return call
        if place >= MAX_CALLS:
            return Call(call.name, call.arguments, f"at most {MAX_CALLS} calls are executed in one turn")
        if call.name not in self._arguments:
            known = ", ".join(sorted(self._arguments))
            return Call(call.name, call.arguments, f"there is no tool {call.name!r}; there are: {known}")
        names = self._arguments[call.name]
        arguments = {
            names[int(key)] if key.isdecimal() and len(key) < 4 and int(key) < len(names) else key: value
            for key, value in call.arguments.items()
        }
        return Call(call.name, arguments)

    def cut(self, text: str) -> str:
        return text if len(text) <= self._max_characters else text[: self._max_characters] + CUT

    async def call(self, call: Call, ask: "Ask") -> ToolResult:
        """Executes one call; a tool that fails in any way is a result that says so."""
        if call.fault:
            return ToolResult(f"error: {call.fault}", is_error=True)
        try:
            return decode(ToolResult, await ask("call", encode(ToolCall(call.name, call.arguments)), self.timeout_s))
        except TimeoutError:
            return ToolResult(f"error: {call.name} took longer than {self.timeout_s:g} s", is_error=True)
        except (RemoteError, ValueError) as error:  # InputError: arguments that are no plain data
            return ToolResult(f"error: {call.name}: {error}", is_error=True)

    async def ask_any(self, method: str, content: bytes, limit_s: float) -> bytes:
        """The reply of a process that keeps no state."""
        try:
            async with self._calls.lend() as worker:
                await worker.send(method, content, limit_s)
                return await worker.receive(limit_s, MAX_REPLY)
        except StartError as error:
            raise _not_started(error) from None


Ask = Callable[[str, bytes, float], Awaitable[bytes]]
"""Method, content and limit in seconds in, the reply out."""


def _not_started(error: StartError) -> ProvisionError:
    return ProvisionError(f"processes for tools and environments cannot be started: {error}")


class OwnProcess:
    """A process that keeps its state over one episode; started when it is needed."""

    def __init__(self, workers: Workers) -> None:
        self._workers, self._lent, self._child = workers, AsyncExitStack(), None
        self._turn = asyncio.Lock()

    _child: Child | None

    async def ask(self, method: str, content: bytes, limit_s: float) -> bytes:
        """The reply to a call, one call at a time. A process that does not reply in time, or dies, is ended with its
        state; the next call begins with a fresh one."""
        async with self._turn:
            try:
                if self._child is None:
                    self._child = await self._lent.enter_async_context(self._workers.lend())
                await self._child.send(method, content, limit_s)
                return await self._child.receive(limit_s, MAX_REPLY)
            except StartError as error:
                raise _not_started(error) from None
            except CallError:  # the code in it raised
                raise
            except BaseException:
                await self._end()
                raise

    async def close(self) -> None:
        """Lets the object in it close, and frees the process for other episodes."""
        if self._child is not None and self._child.is_alive:
            with suppress(TimeoutError, RemoteError):
                await self.ask("close", b"", CLOSE_S)
                await self._lent.aclose()
                self._child = None
        await self._end()

    async def _end(self) -> None:
        """Kills the process with what it started, and frees its place."""
        child, self._child = self._child, None
        if child is not None:
            with suppress(TimeoutError, RemoteError):
                await child.bury()
        await self._lent.aclose()


class Episode:
    """One conversation with the tools and the environment."""

    def __init__(self, world: World, prompt: Prompt) -> None:
        self._world, self._prompt = world, prompt
        self._tools, self._game = OwnProcess(world.tools), OwnProcess(world.games)

    async def begin(self) -> tuple[Mapping[str, str], ...]:
        """The environment's first messages, which follow those of the row."""
        if not self._world.has_environment:
            return ()
        return self._cut((await self._environment("reset", encode(self._prompt))).messages)

    async def answer(self, text: str) -> Reply:
        """Runs all calls of the turn at the same time. Without a call the environment answers; without an environment
        the episode is over."""
        world, started = self._world, time.monotonic()
        if calls := world.parsed(text):
            results = await asyncio.gather(*(self._call(each) for each in calls), return_exceptions=True)
            for each in results:
                if isinstance(each, BaseException):
                    raise each
            done = [each for each in results if isinstance(each, ToolResult)]
            messages = tuple({"role": world.tool_role, "content": world.cut(each.text)} for each in done)
            errors = sum(each.is_error for each in done)
            counts = {"tool_calls": len(calls), "tool_errors": errors, "tool_s": time.monotonic() - started}
            return Reply(messages, counts=counts)
        if not world.has_environment:
            return Reply((), done=True)
        made = await self._environment("step", text.encode("utf-8", "replace"))
        numbers = {f"info/{key}": value for key, value in made.info.items() if type(value) in (bool, int, float)}
        return Reply(
            self._cut(made.messages),
            made.reward,
            made.done,
            {"environment_s": time.monotonic() - started} | {key: float(value) for key, value in numbers.items()},
        )

    async def close(self) -> None:
        """Ends what keeps a state for this episode."""
        try:
            await self._game.close()
        finally:
            await self._tools.close()

    async def _call(self, call: Call) -> ToolResult:
        keeps_state = call.name in self._world.playground.stateful
        return await self._world.call(call, self._tools.ask if keeps_state else self._world.ask_any)

    async def _environment(self, method: str, content: bytes) -> Observation:
        limit_s = self._world.timeout_s
        try:
            return decode(Observation, await self._game.ask(method, content, limit_s))
        except TimeoutError:
            raise EpisodeFailedError(f"{method} took longer than {limit_s:g} s") from None
        except (RemoteError, ValueError) as error:
            raise EpisodeFailedError(f"{method}: {error}") from None

    def _cut(self, messages: Sequence[Mapping[str, str]] | str) -> tuple[Mapping[str, str], ...]:
        assert not isinstance(messages, str)  # a worker sends messages
        return tuple({**each, "content": self._world.cut(each["content"])} for each in messages)
