"""Requests on their way from the event loop to the device thread, and answers on their way back.

    generate ──► RequestQueue ──► decoder, on the device thread ──► answers ──► the calls that wait

Requests that arrive in one turn of the event loop reach the decoder together and in their order, so the batches of a
step do not depend on timing. A decoder runs for as long as it has work; the next request starts it again.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from podium.errors import InputError
from podium.model.device_thread import DeviceThread
from podium.records import Answer, FinishReason, Request
from podium.stages import OnTokens


class Caller:
    """Somebody who waits for an answer in the event loop, and may listen to its tokens."""

    def __init__(self, on_tokens: OnTokens | None) -> None:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._on_tokens, self._num_reported = on_tokens, 0

    def report(self, ids: Sequence[int], answer: Any = None) -> None:
        """All tokens so far, and the answer once there is one."""
        if self.answer.done():
            return
        try:
            if self._on_tokens is not None and len(ids) > self._num_reported:
                new, self._num_reported = list(ids[self._num_reported :]), len(ids)
                self._on_tokens(new)
        except Exception as error:  # the listener's own; other requests continue
            self.answer.set_exception(error)
            return
        if answer is not None:
            self.answer.set_result(answer)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(eq=False)
class Job:
    """A request that is being answered."""

    request: Request
    has_listener: bool = False
    """Whether its tokens are wanted before the answer is there."""
    is_cancelled: bool = False
    """Set by the event loop; the decoder then frees what the job occupies."""
    first_version: int = 0
    """Version of the weights that wrote the first token."""
    num_pauses: int = 0
    """Times that it gave up its keys and values to others and had to wait."""

    def ended(self, ids: Sequence[int], logprobs: Sequence[float], version: int) -> Answer:
        """`version`: of the weights that wrote the last token."""
        reason: FinishReason = "stop" if ids[-1] in self.request.sampling.stop_ids else "length"
        return Answer(tuple(ids), tuple(logprobs), reason, (self.first_version, version), self.num_pauses)


Outcome = tuple[Job, "Answer | list[int]"]
"""A job and its answer, or its tokens so far."""


class Arrivals:
    """Jobs and released names that the decoder has not seen. Filled by one thread and emptied by another."""

    def __init__(self, jobs: Sequence[Job] = ()) -> None:
        self._bursts: deque[list[Job]] = deque([list(jobs)] if jobs else [])
        self._released: deque[str] = deque()

    def __bool__(self) -> bool:
        return bool(self._bursts)

    def add(self, burst: list[Job]) -> None:
        self._bursts.append(burst)

    def release(self, name: str) -> None:
        self._released.append(name)

    def take(self) -> list[Job]:
        """The jobs that have arrived since the last call and are still wanted."""
        found: list[Job] = []
        while self._bursts:
            found += [job for job in self._bursts.popleft() if not job.is_cancelled]
        return found

    def take_released(self) -> list[str]:
        return [self._released.popleft() for _ in range(len(self._released))]

    def peek(self) -> list[Request]:
        """The requests that wait, which stay."""
        return [job.request for burst in tuple(self._bursts) for job in burst]


class Decoder(Protocol):
    """Writes the answers of jobs on the device thread."""

    def run(self, arrivals: Arrivals) -> Iterator[list[Outcome]]:
        """Decodes until no job is left, including jobs that arrive meanwhile. Yields often, so that other work of the
        device thread gets its turn; weights may change between two items."""
        ...


class RequestQueue:
    """`decode` runs a decoder over what has arrived."""

    def __init__(self, thread: DeviceThread, decode: Callable[[Arrivals], Iterator[list[Outcome]]]) -> None:
        self._thread, self._decode = thread, decode
        self._arrivals = Arrivals()
        self._burst: list[Job] = []
        self._callers: dict[Job, Caller] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: asyncio.Task[None] | None = None

    async def answer(self, request: Request, on_tokens: OnTokens | None = None) -> Answer:
        """Waits for the answer. Cancelling this call cancels the request."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # nobody waits for what an earlier event loop left
            self._loop, self._burst, self._callers, self._arrivals = loop, [], {}, Arrivals()
        job, caller = Job(request, on_tokens is not None), Caller(on_tokens)
        self._callers[job] = caller
        self._burst.append(job)
        if len(self._burst) == 1:
            loop.call_soon(self._send_burst)
        try:
            return await caller.answer
        finally:
            job.is_cancelled = True  # no effect on a job that has ended
            self._callers.pop(job, None)

    def release(self, name: str) -> None:
        self._arrivals.release(name)

    def _send_burst(self) -> None:
        burst, self._burst = self._burst, []
        self._arrivals.add(burst)
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Runs the decoder until nothing is left, and hands out what it makes."""
        try:
            while self._arrivals:
                async with aclosing(self._thread.made_ahead(self._decode(self._arrivals))) as items:
                    async for outcomes in items:
                        for job, found in outcomes:
                            ids, answer = (found.token_ids, found) if isinstance(found, Answer) else (found, None)
                            if job in self._callers:
                                self._callers[job].report(ids, answer)
        except Exception as error:
            for caller in self._callers.values():
                caller.fail(error)
            self._arrivals.take()


def decode_now(decoder: Decoder, requests: Sequence[Request]) -> list[Answer]:
    """The answers, written in the calling thread."""
    jobs = [Job(request) for request in requests]
    found = {job: answer for outcomes in decoder.run(Arrivals(jobs)) for job, answer in outcomes}
    return [answer for job in jobs if isinstance(answer := found.get(job), Answer)]


def check_room(request: Request, max_context_tokens: int) -> None:
    """Refuses a request whose longest answer does not fit into the model's context. An engine would cut the answer, or
    write beyond the context that the model was trained for."""
    length, longest = len(request.token_ids), request.sampling.max_new_tokens
    if length + longest > max_context_tokens:
        raise InputError(
            f"{request.label} has {length} tokens and may get {longest} more; the engine's context has "
            f"{max_context_tokens}; shorten the prompt or lower max_new_tokens"
        )
