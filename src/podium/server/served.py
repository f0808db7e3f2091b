"""The engine that is served, its weights, and their owner.

New weights are read and checked beside the old ones, which go on answering; then the answers under way end, new ones
wait, and the engine takes the weights. If anything fails before that, nothing has changed. An engine is built for full
weights or for adapters of one shape; weights of another kind build another engine over the same base model, so a
server takes adapters of any rank and full weights too.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from podium.errors import EngineError, InputError, WeightsError
from podium.model.device_thread import on_device_thread
from podium.model.load import Policy
from podium.records import Request
from podium.remote.rollouts import Written, all_or_none
from podium.server.door import Refusal
from podium.server.gate import Claims, Gate, Scope, within
from podium.server.weights import AdapterShape, Published, locate, read, shape_of
from podium.stages import Engine

HEARTBEAT_S = 2.0
MAX_WAITING_RELOADS = 8
RESTORE_PAUSE_S = 1.0
LOCATE_S, READ_S = 20.0, 1800.0
"""What a disk may take for two small files, and for all weights of a large model."""
OWN_VERSION = 0
"""Of the weights that the server began with."""


@dataclass(frozen=True)
class Maker:
    """How to build what is served; given by the command."""

    policy: Callable[[AdapterShape | None], Policy]
    """The base model with an empty adapter of that shape, or without one."""
    own_policy: Callable[[], Policy]
    """What the server was started with: the base, or the base with its trained adapter."""
    engine: Callable[[Policy], Engine]
    one_engine: bool
    """Whether the old engine must be closed before a new one is built, because the two do not fit beside each other."""


class Served:
    """`run` is the owner of the weights; None: they are the server's own."""

    def __init__(self, maker: Maker, root: Path) -> None:
        self._maker, self.root = maker, root
        self.policy = maker.own_policy()
        self._own_shape = shape_of(self.policy)
        self.engine = maker.engine(self.policy)
        self.gate, self.claims = Gate(), Claims()
        self.run: str | None = None
        self.failed: str | None = None
        """Why there is no engine any more."""
        self._one_reload = asyncio.Lock()
        self._waiting_reloads = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self._take(dict(self.policy.named_weights()), OWN_VERSION, None)

    @property
    def version(self) -> int:
        return self.engine.policy_version or 0

    async def answers(self, requests: Sequence[Request]) -> AsyncGenerator[Written | None]:
        """Each answer as soon as it is whole. A slow client does not slow the engine down:
        its answers wait here. None is yielded now and then as a sign of life."""
        ready: asyncio.Queue[Any] = asyncio.Queue()
        task = asyncio.create_task(self._write_answers(requests, ready))
        try:
            while True:
                item = None
                with suppress(TimeoutError):
                    item = await asyncio.wait_for(ready.get(), HEARTBEAT_S)
                if isinstance(item, BaseException):
                    raise item
                if item == "end":
                    return
                yield item
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _write_answers(self, requests: Sequence[Request], ready: asyncio.Queue[Any]) -> None:
        async def write(place: int, request: Request) -> None:
            ready.put_nowait(Written(place, await self.engine.generate(request), run))

        try:
            async with self.gate.answering():
                self.check_alive()
                run = self.run
                await all_or_none(write(place, request) for place, request in enumerate(requests))
            ready.put_nowait("end")
        except Exception as error:
            ready.put_nowait(error)

    async def score(self, token_ids: Sequence[int]) -> dict[str, Any]:
        async with self.gate.answering():
            self.check_alive()
            return {
                "logprobs": await self.engine.score(token_ids),
                "policy_version": self.version,
                "run": self.run,
            }

    async def held(self) -> dict[str, Any]:
        """What the engine's own tensors are, as checksums; None where it cannot show them."""
        async with self.gate.answering():
            self.check_alive()
            engine: Any = self.engine
            held = await engine.held() if engine.traits.shows_weights else None
            sealed = None if held is None else await on_device_thread(held.sealed)
            return {"held": sealed, "policy_version": self.version, "run": self.run}

    async def reload(self, name: str, version: int, in_flight: bool, run: str | None) -> str:
        """The hash of the weights that are served from now on."""
        if self._waiting_reloads >= MAX_WAITING_RELOADS:
            raise Refusal(503, f"{self._waiting_reloads} reloads are waiting already; try again later")
        self._waiting_reloads += 1
        try:
            async with self._one_reload:
                self.claims.check_writer(run)
                published = await within(LOCATE_S, f"a look at {name}", locate, self.root, name)
                if published.shape == shape_of(self.policy):
                    weights = await within(READ_S, f"reading {name}", read, published, self.policy, version)
                    await self._swap(weights, version, run, in_flight)
                else:
                    await self._rebuild(published, version, run)
                return published.sha256
        finally:
            self._waiting_reloads -= 1

    async def take_transfer(self, receive: Callable[[], Awaitable[None]], run: str | None) -> None:
        """Weights that come from elsewhere than a folder; answers under way end first. They are written over the old
        ones, so after a transfer that broke off nothing is served any more."""
        async with self._one_reload, self.gate.swapping():
            self.claims.check_writer(run)
            try:
                await receive()
            except BaseException as error:
                self.failed = f"a transfer of weights broke off: {type(error).__name__}; start the server again"
                raise
            self.run = run

    def check_alive(self) -> None:
        if self.failed is not None:
            raise Refusal(503, self.failed)

    def claim(self, run: str, scope: Scope) -> None:
        self.claims.take(run, scope)

    def release(self, run: str) -> None:
        """With scope `run` the server goes back to its own weights, once the answers under way have ended."""
        if self.claims.release(run) == "run" and self.run == run:
            task = asyncio.create_task(self._restore_at_last(run))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        self.engine.close()

    async def _swap(self, weights: dict[str, torch.Tensor], version: int, run: str | None, in_flight: bool) -> None:
        if in_flight:
            await self._take(weights, version, run)
            return
        async with self.gate.swapping():
            await self._take(weights, version, run)

    async def _take(self, weights: dict[str, torch.Tensor], version: int, run: str | None) -> None:
        if self.policy.peft is not None:
            # Some engines sample through the policy's own adapter layers.
            await on_device_thread(_copy_into, self.policy, weights)
        await self.engine.load_weights(weights.items(), version)
        self.run = run

    async def _rebuild(self, published: Published, version: int, run: str | None) -> None:
        """An engine for weights of another kind; they are checked against its policy first."""
        try:
            policy = await within(READ_S, "loading the model", self._maker.policy, published.shape)
        except InputError:
            raise WeightsError(f"{published.folder.name}: this model has no layers for such an adapter") from None
        weights = await within(READ_S, f"reading {published.folder.name}", read, published, policy, version)
        async with self.gate.swapping():
            await self._replace(policy, weights, version, run)

    async def _replace(self, policy: Policy, weights: dict[str, torch.Tensor], version: int, run: str | None) -> None:
        old_policy, old_engine = self.policy, self.engine
        if self._maker.one_engine:
            old_engine.close()
        try:
            self.engine = await asyncio.to_thread(self._maker.engine, policy)
            self.policy = policy
            await self._take(weights, version, run)
        except BaseException as error:
            if self._maker.one_engine:
                self.failed = f"the engine could not be built again: {type(error).__name__}; start the server again"
            elif self.engine is not old_engine:
                self.engine.close()
            self.policy, self.engine = old_policy, old_engine
            raise
        if not self._maker.one_engine:
            old_engine.close()

    async def _restore_at_last(self, run: str) -> None:
        """Tries until it has, or until another run's weights are here."""
        while self.run == run and self.failed is None:
            try:
                await self._restore(run)
            except Refusal:  # answers were still being written
                await asyncio.sleep(RESTORE_PAUSE_S)

    async def _restore(self, run: str) -> None:
        async with self._one_reload:
            if self.run != run:
                return  # another run's weights are here already
            if self._own_shape is None and self.policy.peft is not None:
                nothing = {name: torch.zeros_like(tensor) for name, tensor in self.policy.named_weights()}
                await self._swap(nothing, OWN_VERSION, None, in_flight=False)
                return
            policy = await within(READ_S, "loading the model", self._maker.own_policy)
            weights = dict(policy.named_weights())
            if self._own_shape == shape_of(self.policy):
                await self._swap(weights, OWN_VERSION, None, in_flight=False)
                return
            async with self.gate.swapping():
                await self._replace(policy, weights, OWN_VERSION, None)


@torch.no_grad()
def _copy_into(policy: Policy, weights: dict[str, torch.Tensor]) -> None:
    for name, tensor in policy.named_weights():
        tensor.copy_(weights[name])


def failure(error: Exception) -> Refusal:
    """What a client is told when the engine failed."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, EngineError):
        return Refusal(503, f"the engine failed: {error}")
    return Refusal(503, f"the engine failed: {type(error).__name__}")
