"""Every tool of a server that speaks the Model Context Protocol: a command (stdio) or a URL (streamable HTTP).

The server is asked for its tools once, when the run starts. Each episode has a connection of its own, and with
`command` a server process of its own, which ends with the episode.
"""

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field

from podium.errors import InputError

START_S = 60.0
"""For a server to start and to list its tools."""


class Mcp:
    package = "mcp"

    def __init__(
        self,
        *,
        command: Annotated[list[str], Field(description="program and arguments of a server that speaks on stdio")] = [],  # noqa: B006
        url: Annotated[str | None, Field(description="address of a server that speaks streamable HTTP")] = None,
        only: Annotated[list[str], Field(description="names of the tools to offer; empty: all of the server")] = [],  # noqa: B006
    ) -> None:
        self._server = _server(command, url)
        self._client: Any = None
        self._closing = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None

    @classmethod
    def schemas(cls, **options: Any) -> list[Mapping[str, Any]]:
        """OpenAI's descriptions of the server's tools."""
        return _schemas(json.dumps(options, sort_keys=True))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of the result; a result that is an error is raised."""
        client = await self._connected()
        try:
            result = await client.call_tool(name, dict(arguments))
        except Exception:  # the server may have died; the next call begins with a fresh connection
            await self.close()
            raise
        parts = [getattr(part, "text", None) or f"({part.type})" for part in result.content]
        text = "\n".join(parts)
        if result.is_error:
            raise RuntimeError(text)
        return text

    async def close(self) -> None:
        """Ends the connection, and the server that `command` started."""
        self._closing.set()
        owner, self._owner, self._closing = self._owner, None, asyncio.Event()
        if owner is not None:
            with suppress(Exception):
                await owner

    async def _listed(self, only: list[str]) -> list[Mapping[str, Any]]:
        try:
            tools = (await (await self._connected()).list_tools()).tools
        finally:
            await self.close()
        names = [tool.name for tool in tools]
        if missing := [name for name in only if name not in names]:
            raise InputError(f"tool mcp: the server has no tool {missing[0]!r}; it has: {', '.join(names)}")
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or tool.name,
                    "parameters": {"properties": {}, **tool.input_schema},
                },
            }
            for tool in tools
            if not only or tool.name in only
        ]

    async def _connected(self) -> Any:
        """The client. One task owns the connection, since it must be opened and closed in the same task."""
        if self._owner is None or self._owner.done():
            opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._owner = asyncio.create_task(self._own(opened, self._closing))
            self._client = await opened
        return self._client

    async def _own(self, opened: "asyncio.Future[Any]", closing: asyncio.Event) -> None:
        from mcp import Client

        try:
            async with Client(self._server) as client:
                opened.set_result(client)
                await closing.wait()
        except BaseException as error:
            if not opened.done():
                cause: BaseException = error
                while isinstance(cause, BaseExceptionGroup):
                    cause = cause.exceptions[0]
                opened.set_exception(RuntimeError(f"the MCP server cannot be reached: {cause}"))
                opened.exception()  # looked at, also where nobody waits any more
            raise


@lru_cache(maxsize=16)
def _schemas(options: str) -> list[Mapping[str, Any]]:
    """Asks the server once per process, in a thread of its own: an event loop may be running in this one."""
    given = json.loads(options)

    async def listed() -> list[Mapping[str, Any]]:
        return await asyncio.wait_for(Mcp(**given)._listed(given.get("only", [])), START_S)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, listed()).result(2 * START_S)


def _server(command: list[str], url: str | None) -> Any:
    from mcp import StdioServerParameters

    if bool(command) == bool(url):
        raise InputError("tool mcp: give either command or url")
    return url or StdioServerParameters(command=command[0], args=command[1:])
