"""One stepping loop over vLLM for all who wait for it.

In: prompts of any call, at any time. Out: each final output, to the call that asked, with the policy versions of its
first and last token. All work is done on the device thread, a step at a time, so new weights come between two steps:
a request under LoRA keeps the adapter that it began with, one under full weights goes on with the new ones. An adapter
is dropped when nobody uses it any more.
"""

import asyncio
import itertools
import shutil
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from podium.errors import EngineError
from podium.model.device_thread import on_device_thread

Asked = tuple[Sequence[int], Any]
"""Token ids and vLLM's sampling parameters."""


@dataclass(frozen=True)
class Served:
    """The weights that new requests get."""

    version: int
    salt: str
    """Of the prefix cache: another for each load, so that no request is written from older weights' keys."""
    adapter: Any = None
    """vLLM's LoRA request; None for full weights."""
    own_folder: bool = False
    """Whether the adapter's folder was written for vLLM and goes with it."""


@dataclass
class Pending:
    """A request that vLLM works on."""

    inbox: "asyncio.Queue[Any]"
    served: Served
    first_version: int | None = None
    """Of its first token, once the weights have changed after it; None: there was no change since."""


class SharedSteps:
    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._served = Served(version=0, salt="base")
        self._pending: dict[str, Pending] = {}
        self._retired: list[Served] = []
        """Adapters that only requests under way still use."""
        self._inboxes: set[asyncio.Queue[Any]] = set()
        self._count = itertools.count()
        self._stepping: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self._pending)

    @property
    def served(self) -> Served:
        return self._served

    async def outputs(self, asked: Sequence[Asked]) -> AsyncGenerator[tuple[int, Any, tuple[int, int]], None]:
        """(index in `asked`, vLLM's output, versions of its first and last token), each as soon as it is finished.

        Closing the iterator aborts the rest; a step that fails is an error of every call that waits.
        """
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        names = {str(next(self._count)): index for index in range(len(asked))}
        self._inboxes.add(inbox)
        try:
            await on_device_thread(self._add, dict(zip(names, asked, strict=True)), inbox)
            self._keep_stepping()
            while names:
                message = await inbox.get()
                if isinstance(message, BaseException):
                    raise EngineError(f"vLLM failed: {type(message).__name__}: {message}") from message
                name, output, versions = message
                yield names.pop(name), output, versions
        finally:
            self._inboxes.discard(inbox)
            if names:
                await on_device_thread(self._abort, list(names))

    def serve(self, served: Served) -> None:
        """On the device thread: requests added from now on get these weights, which vLLM holds already."""
        for name in self._started():
            pending = self._pending[name]
            pending.first_version = self._served.version if pending.first_version is None else pending.first_version
        if self._served.adapter is not None:
            self._retired.append(self._served)
        self._served = served
        self._drop_unused()

    def _started(self) -> list[str]:
        """Pending requests that have a token, or are in a step whose tokens vLLM has not handed out yet."""
        running = {request.request_id for request in self._engine.engine_core.engine_core.scheduler.running}
        states = self._engine.output_processor.request_states
        started = {s.external_req_id for name, s in states.items() if name in running or not s.is_prefilling}
        return [name for name in self._pending if name in started]

    def _add(self, asked: dict[str, Asked], inbox: "asyncio.Queue[Any]") -> None:
        for name, (token_ids, parameters) in asked.items():
            prompt = {"prompt_token_ids": list(token_ids), "cache_salt": self._served.salt}
            self._engine.add_request(name, prompt, parameters, lora_request=self._served.adapter)
            self._pending[name] = Pending(inbox, self._served)

    def _abort(self, names: list[str]) -> None:
        for name in names:
            self._pending.pop(name, None)
        self._engine.abort_request(names)
        self._drop_unused()

    def _keep_stepping(self) -> None:
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_until_idle())

    async def _step_until_idle(self) -> None:
        """Goes on whether or not anybody takes what is finished."""
        try:
            while self._pending:
                for inbox, message in await on_device_thread(self._step):
                    inbox.put_nowait(message)
        except BaseException as error:
            for inbox in self._inboxes:
                inbox.put_nowait(error)
            if not isinstance(error, Exception):
                raise

    def _step(self) -> list[tuple["asyncio.Queue[Any]", Any]]:
        finished = []
        for output in self._engine.step():
            if output.finished and (pending := self._pending.pop(output.request_id, None)) is not None:
                finished.append((pending.inbox, (output.request_id, output, self._versions(pending))))
        if finished:
            self._drop_unused()
        return finished

    def _versions(self, pending: Pending) -> tuple[int, int]:
        if pending.served.adapter is not None:
            return pending.served.version, pending.served.version
        now = self._served.version
        return now if pending.first_version is None else pending.first_version, now

    def _drop_unused(self) -> None:
        """Takes out retired adapters that no request uses, with the folders that were written for them."""
        used = {id(pending.served) for pending in self._pending.values()}
        for served in [served for served in self._retired if id(served) not in used]:
            self._retired.remove(served)
            if served.adapter.lora_int_id != getattr(self._served.adapter, "lora_int_id", None):
                self._engine.remove_lora(served.adapter.lora_int_id)
            if served.own_folder:
                shutil.rmtree(served.adapter.lora_path, ignore_errors=True)
