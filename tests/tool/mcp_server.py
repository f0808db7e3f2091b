"""A server of the Model Context Protocol with a few tools, for tests: python tests/tool/mcp_server.py"""

import os

from mcp.server import MCPServer

server = MCPServer("tests")
count = 0


@server.tool()
def shout(text: str, times: int = 1) -> str:
    """Says it louder."""
    return " ".join([text.upper()] * times)


@server.tool()
def tick() -> int:
    """Counts its calls."""
    global count
    count += 1
    return count


@server.tool()
def fails() -> str:
    """Raises."""
    raise ValueError("no")


@server.tool()
def dies() -> str:
    """Ends the server."""
    os._exit(1)


if __name__ == "__main__":
    server.run()
