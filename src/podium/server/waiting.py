"""Work for a client that may go away."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from podium.server.refusal import Refusal

T = TypeVar("T")


async def unless_gone(request: HttpRequest, answers: Awaitable[T]) -> T:
    """The answers, or a cancelled engine if the client goes away first."""
    work, gone = asyncio.ensure_future(answers), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise Refusal(503, "the client went away")
        return await work
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)
