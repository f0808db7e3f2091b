"""Requests to an engine in another process: single requests in, calls of many requests out.

Callers ask for one rollout at a time. All requests of one turn of the event loop travel in one call, or in a few. Each
answer reaches its own caller as soon as it arrives.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from podium.errors import CodecError, EngineError
from podium.records import Answer, Request
from podium.stages import OnTokens

Answers = AsyncGenerator[tuple[int, Answer]]
"""Answers of one call as they arrive, each with the place of its request in the call."""
Waiting = tuple[Request, "asyncio.Future[Answer]"]


@dataclass(frozen=True)
class Rollouts:
    """The body of a call to a server. Several requests may share one prompt, so prompts are listed separately."""

    prompts: tuple[tuple[int, ...], ...]
    requests: tuple[tuple[int, Request], ...]
    """The place of its prompt, and the request without token ids."""
    run: str | None
    """The run that asks, if a run has claimed the engine."""

    @classmethod
    def of(cls, requests: Sequence[Request], run: str | None) -> "Rollouts":
        places: dict[tuple[int, ...], int] = {}
        for request in requests:
            places.setdefault(request.token_ids, len(places))
        bare = tuple((places[request.token_ids], replace(request, token_ids=())) for request in requests)
        return cls(tuple(places), bare, run)

    def whole(self) -> Iterator[Request]:
        for place, request in self.requests:
            if not 0 <= place < len(self.prompts) or request.token_ids:
                raise CodecError("requests: each names the place of its prompt and holds no token ids itself")
            yield replace(request, token_ids=self.prompts[place])


@dataclass(frozen=True)
class Written:
    """One answer of a call: the place of its request, and the run that owns the weights."""

    place: int
    answer: Answer
    run: str | None


class Batching:
    """`ask` makes one call. `calls` says which requests of a turn go into one call, by their places."""

    def __init__(
        self,
        ask: Callable[[list[Request]], Answers],
        calls: Callable[[Sequence[Request]], Iterable[Sequence[int]]] = lambda requests: [range(len(requests))],
    ) -> None:
        self._ask, self._parts = ask, calls
        self._waiting: list[Waiting] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Answer:
        """The answer to one request. A call is cancelled once all of its requests are."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((request, answer))
        written = await answer
        if on_tokens is not None:
            on_tokens(written.token_ids)
        return written

    async def settled(self) -> None:
        """Returns when the calls under way have ended."""
        if self._calls:
            await asyncio.wait(set(self._calls))

    def _send(self) -> None:
        waiting = [each for each in self._waiting if not each[1].done()]
        self._waiting = []
        for places in self._parts([request for request, _ in waiting]):
            self._start([waiting[place] for place in places])

    def _start(self, part: list[Waiting]) -> None:
        if not part:
            return
        call = asyncio.get_running_loop().create_task(self._settle(part))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        answers = [answer for _, answer in part]

        def settled(_: object) -> None:
            if any(answer.cancelled() for answer in answers):
                call.cancel()

        asyncio.gather(*answers, return_exceptions=True).add_done_callback(settled)

    async def _settle(self, part: list[Waiting]) -> None:
        """Makes the call. Its error is the error of each request that has no answer yet."""
        failure: BaseException = EngineError("the engine left a request without an answer")
        try:
            async with aclosing(self._ask([request for request, _ in part])) as answers:
                async for place, answer in answers:
                    if not part[place][1].done():
                        part[place][1].set_result(answer)
        except asyncio.CancelledError:
            for _, answer in part:
                answer.cancel()
            raise
        except Exception as error:
            failure = error
        for _, answer in part:
            if not answer.done():
                answer.set_exception(failure)
