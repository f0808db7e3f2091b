"""One stepping loop over vLLM for all requests.

In: requests, at any time. Out: the final output of each, with the policy versions of its first and last token. The
device thread does all work, one step at a time, so new weights come between two steps. A request under LoRA keeps the
adapter that it began with; a request under full weights goes on with the new weights. An adapter is dropped once no
request uses it.
"""

import asyncio
import itertools
import shutil
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from podium.engine.decoding.queue import Caller
from podium.errors import EngineError
from podium.model.device_thread import on_device_thread
from podium.stages import OnTokens


@dataclass(frozen=True)
class Served:
    """The weights that new requests get."""

    version: int
    salt: str
    """Of the prefix cache: a new one for each load, so no request uses keys of older weights."""
    adapter: Any = None
    """vLLM's LoRA request; None for full weights."""
    own_folder: bool = False
    """Whether the adapter's folder was written for vLLM and is removed with the adapter."""


@dataclass(eq=False)
class Pending:
    """A request that waits for vLLM, or that vLLM works on."""

    name: str
    token_ids: Sequence[int]
    parameters: Any
    """vLLM's sampling parameters."""
    caller: Caller
    """Gets vLLM's final output, and the versions of its first and last token."""
    served: Served | None = None
    """The weights that the request began with; None before vLLM has it."""
    first_version: int | None = None
    """Of its first token, if the weights have changed since; None if not."""

    def settle(self, outcome: Any) -> None:
        """In the event loop, with an error, or with an output of vLLM and, if it is the final one, its versions."""
        if isinstance(outcome, Exception):
            self.caller.fail(outcome)
        else:
            output, versions = outcome
            self.caller.report(output.outputs[0].token_ids, versions and (output, versions))


class SharedSteps:
    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.served = Served(version=0, salt="base")
        self._new: deque[Pending] = deque()
        """Requests that the next step gives to vLLM."""
        self._pending: dict[str, Pending] = {}
        """Requests that vLLM works on."""
        self._retired: list[Served] = []
        """Adapters that only requests under way still use."""
        self._count = itertools.count()
        self._stepping: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self._pending or self._new)

    async def output(
        self, token_ids: Sequence[int], parameters: Any, on_tokens: OnTokens | None = None
    ) -> tuple[Any, tuple[int, int]]:
        """vLLM's final output and the versions of its first and last token. Cancelling the call aborts the request; a
        step that fails is an error of every request. `on_tokens` needs outputs of the cumulative kind."""
        pending = Pending(str(next(self._count)), token_ids, parameters, Caller(on_tokens))
        self._new.append(pending)
        self._keep_stepping()
        try:
            return await pending.caller.answer
        except BaseException:
            await on_device_thread(self._abort, pending)
            raise

    def serve(self, served: Served) -> None:
        """On the device thread: requests added from now on get these weights, which vLLM holds already."""
        for name in self._started():
            pending = self._pending[name]
            pending.first_version = self.served.version if pending.first_version is None else pending.first_version
        if self.served.adapter is not None:
            self._retired.append(self.served)
        self.served = served
        self._drop_unused()

    def _started(self) -> list[str]:
        """Pending requests that have a token, or are in a step whose tokens vLLM has not handed out yet."""
        running = {request.request_id for request in self._engine.engine_core.engine_core.scheduler.running}
        states = self._engine.output_processor.request_states
        started = {s.external_req_id for name, s in states.items() if name in running or not s.is_prefilling}
        return [name for name in self._pending if name in started]

    def _abort(self, pending: Pending) -> None:
        if pending in self._new:
            self._new.remove(pending)
        if self._pending.pop(pending.name, None) is not None:
            self._engine.abort_request([pending.name])
            self._drop_unused()

    def _keep_stepping(self) -> None:
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step_until_idle())

    async def _step_until_idle(self) -> None:
        try:
            while self.is_busy:
                for pending, outcome in await on_device_thread(self._step):
                    pending.settle(outcome)
        except BaseException as error:
            for pending in (*self._new, *self._pending.values()):
                pending.settle(EngineError(f"vLLM failed: {type(error).__name__}: {error}"))
            if not isinstance(error, Exception):
                raise

    def _step(self) -> list[tuple[Pending, Any]]:
        """The outputs of one step of vLLM, for the event loop."""
        outcomes = self._add_new()
        for output in self._engine.step():
            pending = self._pending.get(output.request_id)
            if pending is None:
                continue
            if output.finished:
                del self._pending[output.request_id]
                outcomes.append((pending, (output, self._versions(pending))))
            else:
                outcomes.append((pending, (output, None)))
        self._drop_unused()
        return outcomes

    def _add_new(self) -> list[tuple[Pending, Any]]:
        """Gives vLLM the new requests. One that vLLM refuses fails alone."""
        refused: list[tuple[Pending, Any]] = []
        while self._new:
            pending = self._new.popleft()
            prompt = {"prompt_token_ids": list(pending.token_ids), "cache_salt": self.served.salt}
            try:
                self._engine.add_request(pending.name, prompt, pending.parameters, lora_request=self.served.adapter)
            except Exception as error:
                refused.append((pending, error))
            else:
                pending.served, self._pending[pending.name] = self.served, pending
        return refused

    def _versions(self, pending: Pending) -> tuple[int, int]:
        assert pending.served is not None
        if pending.served.adapter is not None:
            return pending.served.version, pending.served.version
        now = self.served.version
        return now if pending.first_version is None else pending.first_version, now

    def _drop_unused(self) -> None:
        """Removes retired adapters that no request uses, with the folders that were written for them."""
        if not self._retired:
            return
        used = {id(pending.served) for pending in self._pending.values()}
        for served in [served for served in self._retired if id(served) not in used]:
            self._retired.remove(served)
            if served.adapter.lora_int_id != getattr(self.served.adapter, "lora_int_id", None):
                self._engine.remove_lora(served.adapter.lora_int_id)
            if served.own_folder:
                shutil.rmtree(served.adapter.lora_path, ignore_errors=True)
