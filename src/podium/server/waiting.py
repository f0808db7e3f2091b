"""Work for a client that may go away, and for a disk that may not answer."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from podium.server.refusal import Refusal

T = TypeVar("T")
READ = ["GET", "HEAD"]
"""Methods of a route that only tells something. FastAPI does not add HEAD by itself."""


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


async def within(limit_s: float, what: str, function: Callable[..., T], *given: Any) -> T:
    """The result of a function that may wait for a disk; 503 when it is not there in time.

    It runs in a thread that the end of the process does not wait for, as it would for one of asyncio's.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not done.done():
            set_outcome(outcome)

    def work() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = (done.set_result, function(*given))
        except BaseException as error:
            outcome = (done.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finish, *outcome)

    threading.Thread(target=work, name="disk", daemon=True).start()
    try:
        return await asyncio.wait_for(done, limit_s)
    except TimeoutError:
        raise Refusal(503, f"{what} took more than {limit_s:g} s") from None
