"""What runs in the worker process of tools and environments: the user's code, and nothing of the trainer.

A worker serves stateless calls of tools, or one whole episode: an environment, or tools that are classes, keep their
state in it. What user code returns is checked here, so that the driver reads only `ToolResult` and `Observation`.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from podium.environment.episode.calls import checked_arguments
from podium.errors import first_line
from podium.records import Observation, Prompt
from podium.remote.codec import decode, encode, from_json
from podium.settings.lookup import find, validate_options

ROLES = ("user", "tool", "system")
MAX_CHARACTERS = 1 << 20
"""Of one observation; the rest is cut off here, and the driver cuts more by its own limit."""


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ToolResult:
    """What the policy reads after a call."""

    text: str
    is_error: bool = False


@dataclass(frozen=True)
class ToolRecipe:
    """One `[[tool]]` table."""

    name: str
    options: Mapping[str, Any]
    functions: tuple[str, ...]
    """What the policy calls: one function, or all of a tool that brings several."""


@dataclass(frozen=True)
class EpisodeRecipe:
    """What a worker makes: names and plain options."""

    tools: tuple[ToolRecipe, ...] = ()
    environment: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


class Served:
    """Made once per server process, so that user modules are imported once; each episode makes its own instances."""

    def __init__(self, recipe: str) -> None:
        made: EpisodeRecipe = from_json(EpisodeRecipe, recipe)
        self._tools = {name: _bound("tool", tool.name, tool.options) for tool in made.tools for name in tool.functions}
        self._set_of = {name: tool.functions[0] for tool in made.tools for name in tool.functions}
        self._make = _bound("environment", made.environment, made.options) if made.environment else None
        self._kept: dict[str, Any] = {}
        self._environment: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, content: bytes, reply: Callable[[bytes], None]) -> None:
        """Executes a tool. An exception becomes a text that the policy reads."""
        task: ToolCall = decode(ToolCall, content)
        try:
            function = self._tool(task.name)
            if brings_several(function):
                made = self._run(function.call, task.name, dict(task.arguments))
            else:
                made = self._run(function, **checked_arguments(task.name, callable_of(function), task.arguments))
            result = ToolResult(_text(made))
        except Exception as error:
            result = ToolResult(f"error: {type(error).__name__}: {first_line(error)}"[:2000], is_error=True)
        reply(encode(result))

    def reset(self, content: bytes, reply: Callable[[bytes], None]) -> None:
        """Begins an episode of the environment."""
        assert self._make is not None
        self._environment = self._make()
        made = self._run(self._environment.reset, decode(Prompt, content))
        reply(encode(Observation(messages=_messages(made, "reset"))))

    def step(self, content: bytes, reply: Callable[[bytes], None]) -> None:
        """Hands the policy's turn to the environment."""
        made = self._run(self._environment.step, content.decode())
        if not isinstance(made, Observation):
            made = Observation(messages=made)
        messages = _messages(made.messages, "step")
        if not made.done and not messages:
            raise TypeError("step returned nothing for the policy to read; return an Observation with done=True to end")
        reply(encode(Observation(messages, float(made.reward), bool(made.done), dict(made.info))))

    def close(self, content: bytes, reply: Callable[[bytes], None]) -> None:
        """Ends the episode: `close()` of the environment and of tools that have one."""
        ending = [each for each in (self._environment, *self._kept.values()) if hasattr(each, "close")]
        self._environment, self._kept = None, {}
        errors: list[Exception] = []
        for each in ending:
            try:
                self._run(each.close)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        reply(b"")

    def _tool(self, name: str) -> Any:
        bound = self._tools[name]
        if not inspect.isclass(bound.func):
            return bound
        if self._set_of[name] not in self._kept:
            self._kept[self._set_of[name]] = bound()
        return self._kept[self._set_of[name]]

    def _run(self, function: Any, *args: Any, **named: Any) -> Any:
        """The value of a function or coroutine function."""
        made = function(*args, **named)
        if not inspect.isawaitable(made):
            return made
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(_awaited(made))


def _bound(stage: str, name: str, options: Mapping[str, Any]) -> partial[Any]:
    """A tool or an environment with its options, which travelled as plain data."""
    found = find(stage, name)
    return partial(found, **validate_options(f"{stage} {name!r}", found, options))


def tool_name(name: str) -> str:
    """What the policy calls a tool that the settings name."""
    return name.rpartition(":")[2]


def brings_several(tool: Any) -> bool:
    """Whether a tool is a class that brings several functions, which `schemas(**options)` lists and `call` executes."""
    return hasattr(tool, "schemas") and hasattr(tool, "call")


def callable_of(tool: Any) -> Callable[..., Any]:
    """The function whose signature describes a tool, which may be a class or an instance."""
    if inspect.isclass(tool):
        return partial(tool.__call__, None)
    return tool.func if isinstance(tool, partial) else tool


async def _awaited(made: Any) -> Any:
    return await made


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    text = value if isinstance(value, str) else repr(value)
    return text.encode("utf-8", "replace").decode()[:MAX_CHARACTERS]


def _messages(made: Any, method: str) -> tuple[Mapping[str, str], ...]:
    """A text is one message of the user; None is no message."""
    if made is None:
        return ()
    if isinstance(made, str | bytes):
        return ({"role": "user", "content": _text(made)},)
    if not isinstance(made, Sequence) or not all(isinstance(each, Mapping) for each in made):
        raise TypeError(f"{method} returned a {type(made).__name__}; return a text or a list of messages")
    for each in made:
        if each.get("role") not in ROLES or not isinstance(each.get("content"), str | bytes):
            raise TypeError(
                f"{method} returned a message {dict(each)!r:.200}; give role ({', '.join(ROLES)}) and content"
            )
    return tuple({"role": each["role"], "content": _text(each["content"])} for each in made)
