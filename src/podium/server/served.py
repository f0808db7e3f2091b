"""The engine that is served, its weights, and the run that owns them.

New weights are read and checked while the engine answers with the old ones. Then a swap waits for the answers under
way, holds new ones back, and the engine takes the weights. If anything fails before that, nothing has changed. An
engine is built for full weights or for adapters of one shape. For weights of another kind the server builds another
engine over the same base model, so one server takes full weights and adapters of any rank.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import torch
from pydantic import BaseModel, Field, ValidationError

from podium.errors import EngineError, InputError, WeightsError
from podium.model.device_thread import on_device_thread
from podium.model.handoff import Manifest, manifest_of, read_published
from podium.model.load import Policy
from podium.records import Request
from podium.remote.rollouts import Written
from podium.remote.tasks import Changes, all_or_none, end_tasks
from podium.server.door import Refusal
from podium.stages import Engine
from podium.untrusted import read_regular

T = TypeVar("T")
Weights = dict[str, torch.Tensor]
Scope = Literal["run", "engine"]

MAX_WAITING_RELOADS = 8
RESTORE_PAUSE_S = 1.0
LOCATE_S, READ_S = 20.0, 1800.0
"""Limits for reading two small files from a disk, and all weights of a large model."""
OWN_VERSION = 0
"""Of the weights that the server started with."""
MAX_JSON_BYTES = 1 << 20
IDLE_S = 900.0
"""Seconds of silence after which another run may take over the claim. The silent run gets an error if it returns."""


class Gate:
    """Lets calls through at the same time, and a swap of weights alone.

    A swap waits for the calls under way and holds new ones back, so one version writes each answer. A call whose client
    goes away leaves the queue. The number of connections (door.py) bounds how many calls wait.
    """

    def __init__(self, max_running: int = 256, drain_s: float = 600) -> None:
        """`max_running`: calls that the engine works on at the same time. A swap does not wait for the others."""
        self.running = self.waiting = 0
        self._max_running, self._drain_s = max_running, drain_s
        self._is_closed = False
        self._changes = Changes()

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        self.waiting += 1
        try:
            await self._changes.until(lambda: not self._is_closed and self.running < self._max_running)
            self.running += 1
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self.running -= 1
            self._changes.notify()

    @asynccontextmanager
    async def swapping(self) -> AsyncIterator[None]:
        """The caller makes sure that there is one at a time."""
        self._is_closed = True
        try:
            try:
                async with asyncio.timeout(self._drain_s):
                    await self._changes.until(lambda: self.running == 0)
            except TimeoutError:
                raise Refusal(503, f"answers were still being written after {self._drain_s:g} s") from None
            yield
        finally:
            self._is_closed = False
            self._changes.notify()


@dataclass
class Claim:
    run: str
    scope: Scope
    seen: float


class Claims:
    """Which run owns the engine's weights; an engine has one run at a time. The scope of the claim says what happens
    when the run ends. `run`: the server goes back to its own weights; `engine`: it goes on serving the run's."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._held: Claim | None = None
        self._kept: Claim | None = None
        """Of a run that has ended and whose weights stay."""

    @property
    def run(self) -> str | None:
        return self._held.run if self._held else None

    def take(self, run: str, scope: Scope) -> None:
        held, kept = self._held, self._kept
        if held is not None and held.run != run and time.monotonic() - held.seen < self._idle_s:
            raise Refusal(409, f"the engine is claimed by run {held.run!r} (scope {held.scope!r})")
        if held is not None and held.run == run and held.scope != scope:
            raise Refusal(409, f"run {run!r} has claimed the engine with scope {held.scope!r}, not {scope!r}")
        if kept is not None and kept.scope != scope:
            raise Refusal(
                409,
                f"the engine keeps the weights of run {kept.run!r} (scope {kept.scope!r}); scope {scope!r} would take "
                f"them away: use scope {kept.scope!r}, or another engine",
            )
        self._held = Claim(run, scope, time.monotonic())

    def check(self, run: str | None) -> None:
        """Refuses a run that lost its claim; notes that a run with a claim is alive. A client without a run only
        reads."""
        held = self._held
        if run is None:
            return
        if held is None or held.run != run:
            holder = f"run {held.run!r} has" if held else "nobody has"
            raise Refusal(409, f"run {run!r} has no claim on this engine, {holder}")
        held.seen = time.monotonic()

    def check_writer(self, run: str | None) -> None:
        """Only the run that holds the claim may change weights; if there is no claim, any client may."""
        if run is None and self._held is not None:
            raise Refusal(409, f"the engine is claimed by run {self._held.run!r} (scope {self._held.scope!r})")
        self.check(run)

    def release(self, run: str) -> Scope | None:
        """The scope of the claim that ends; None if the run had none."""
        held = self._held
        if held is None or held.run != run:
            return None
        self._held = None
        if held.scope == "engine":
            self._kept = held
        return held.scope


class AdapterShape(BaseModel):
    """The part of an adapter's configuration that decides its tensors and their effect. Plain LoRA only: a variant
    would be served with the wrong scale."""

    r: int = Field(ge=1, le=1024)
    lora_alpha: float = Field(gt=0, allow_inf_nan=False)
    target_modules: frozenset[str] = Field(min_length=1, max_length=256)
    use_rslora: Literal[False] = False
    use_dora: Literal[False] = False
    bias: Literal["none"] = "none"
    rank_pattern: dict[str, int] | None = Field(default=None, max_length=0)
    alpha_pattern: dict[str, float] | None = Field(default=None, max_length=0)
    modules_to_save: None = None

    def __eq__(self, other: object) -> bool:
        keys = ("r", "lora_alpha", "target_modules")
        return isinstance(other, AdapterShape) and all(getattr(self, key) == getattr(other, key) for key in keys)


@dataclass(frozen=True)
class Published:
    folder: Path
    shape: AdapterShape | None
    """None: full weights."""
    sha256: str
    """Of the file that holds the tensors."""


def locate(root: Path, name: str) -> Published:
    """The published folder of that name. Opens only what lies, links resolved, directly under the root."""
    folder = root / name
    for path in (folder, root / f"{name}.json"):
        if path.resolve() != root.resolve() / path.name or path.is_symlink():
            raise Refusal(403, "weights are read from the server's root only")
        if not path.exists():
            raise Refusal(404, f"there are no weights called {name}")
    shape = None
    try:
        manifest = msgspec.json.decode(_content(manifest_of(folder)), type=Manifest)
        is_adapter = manifest["kind"] == "adapter"
        file = "adapter_model.safetensors" if is_adapter else "model.safetensors"
        sha256 = str(manifest["files"][file]["sha256"])
    except (OSError, ValueError, KeyError, RecursionError):
        raise WeightsError(f"{name}.json cannot be read") from None
    try:
        if is_adapter:
            shape = AdapterShape.model_validate_json(_content(folder / "adapter_config.json"))
    except (OSError, ValidationError):
        raise WeightsError(f"{name}: adapter_config.json cannot be read or is not one of plain LoRA") from None
    return Published(folder, shape, sha256)


def _content(path: Path) -> bytes:
    return read_regular(path, max_bytes=MAX_JSON_BYTES, follow_links=False)


def read(published: Published, policy: Policy, version: int) -> Weights:
    """The tensors: complete, of the right shapes and finite. Those of an adapter are on the policy's device."""
    found = read_published(published.folder, dict(policy.named_weights()), version)
    return found if policy.peft is None else {name: tensor.to(policy.device) for name, tensor in found.items()}


def shape_of(policy: Policy) -> AdapterShape | None:
    if policy.peft is None:
        return None
    config = policy.peft.peft_config["default"]
    targets = config.target_modules
    modules = frozenset([targets] if isinstance(targets, str) else targets)
    return AdapterShape(r=config.r, lora_alpha=config.lora_alpha, target_modules=modules)


async def within(limit_s: float, what: str, function: Callable[..., T], *given: Any) -> T:
    """The result of a function that may wait for a disk; 503 if it is late. It runs in a daemon thread: the end of the
    process would wait for a thread of asyncio's."""
    outcome: Future[T] = Future()

    def work() -> None:
        outcome.set_running_or_notify_cancel()
        try:
            outcome.set_result(function(*given))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="disk", daemon=True).start()
    try:
        return await asyncio.wait_for(asyncio.wrap_future(outcome), limit_s)
    except TimeoutError:
        raise Refusal(503, f"{what} took more than {limit_s:g} s") from None


@dataclass(frozen=True)
class Maker:
    """How to build what is served; given by the command."""

    policy: Callable[[AdapterShape | None], Policy]
    """The base model with an empty adapter of that shape, or without one."""
    own_policy: Callable[[], Policy]
    """What the server started with: the base, or the base with its trained adapter."""
    engine: Callable[[Policy], Engine]
    one_engine: bool
    """Whether the old engine must be closed before a new one is built, because two do not fit into memory."""


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

    @property
    def max_context_tokens(self) -> int:
        return self.engine.traits.max_context_tokens or self.policy.max_context_tokens

    async def answers(self, requests: Sequence[Request]) -> AsyncGenerator[Written]:
        """Each answer as soon as it is complete. Answers wait here for a slow client, so the client does not slow the
        engine down."""
        ready: asyncio.Queue[Any] = asyncio.Queue()
        task = asyncio.create_task(self._write_answers(requests, ready))
        task.add_done_callback(ready.put_nowait)
        try:
            while (item := await ready.get()) is not task:
                yield item
            await task  # raises its error
        finally:
            await end_tasks([task])

    async def _write_answers(self, requests: Sequence[Request], ready: asyncio.Queue[Any]) -> None:
        async with self._answering():
            run = self.run

            async def write(place: int, request: Request) -> None:
                ready.put_nowait(Written(place, await self.engine.generate(request), run))

            await all_or_none(write(place, request) for place, request in enumerate(requests))

    async def score(self, token_ids: Sequence[int]) -> dict[str, Any]:
        async with self._answering():
            logprobs = await self.engine.score(token_ids)
            return {"logprobs": logprobs, "policy_version": self.version, "run": self.run}

    async def held(self) -> dict[str, Any]:
        """Checksums of the engine's own tensors; None if the engine cannot show them."""
        async with self._answering():
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
                policy = self.policy
                if published.shape != shape_of(policy):
                    policy = await self._other_policy(published)
                weights = await within(READ_S, f"reading {name}", read, published, policy, version)
                await self._swap(policy, weights, version, run, in_flight)
                return published.sha256
        finally:
            self._waiting_reloads -= 1

    async def take_transfer(self, receive: Callable[[], Awaitable[None]], run: str | None) -> None:
        """Takes weights that do not come from a folder, once the answers under way have ended. They overwrite the old
        weights, so after a failed transfer the server serves nothing any more."""
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

    def release(self, run: str) -> None:
        """With scope `run` the server goes back to its own weights, once the answers under way have ended."""
        if self.claims.release(run) == "run" and self.run == run:
            task = asyncio.create_task(self._restore_at_last(run))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        self.engine.close()

    @asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        async with self.gate.answering():
            self.check_alive()
            yield

    async def _other_policy(self, published: Published) -> Policy:
        """For weights of another kind."""
        try:
            return await within(READ_S, "loading the model", self._maker.policy, published.shape)
        except InputError:
            raise WeightsError(f"{published.folder.name}: this model has no layers for such an adapter") from None

    async def _swap(
        self, policy: Policy, weights: Weights, version: int, run: str | None, in_flight: bool = False
    ) -> None:
        """Once the answers under way have ended, or in the middle of them; a new `policy` gets a new engine."""
        is_other = policy is not self.policy
        async with nullcontext() if in_flight and not is_other else self.gate.swapping():
            if is_other:
                await self._replace(policy, weights, version, run)
            else:
                await self._take(weights, version, run)

    async def _take(self, weights: Weights, version: int, run: str | None) -> None:
        if self.policy.peft is not None:
            # Some engines sample through the policy's own adapter layers.
            await on_device_thread(_copy_into, self.policy, weights)
        await self.engine.load_weights(weights.items(), version)
        self.run = run

    async def _replace(self, policy: Policy, weights: Weights, version: int, run: str | None) -> None:
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
        """Tries until it succeeds, or until another run's weights are here."""
        while self.run == run and self.failed is None:
            try:
                await self._restore(run)
            except Refusal:  # answers were still being written
                await asyncio.sleep(RESTORE_PAUSE_S)

    async def _restore(self, run: str) -> None:
        async with self._one_reload:
            if self.run != run:
                return
            policy = self.policy
            if self._own_shape is None and policy.peft is not None:
                weights = {name: torch.zeros_like(tensor) for name, tensor in policy.named_weights()}
            else:
                own = await within(READ_S, "loading the model", self._maker.own_policy)
                weights = dict(own.named_weights())
                policy = policy if self._own_shape == shape_of(policy) else own
            await self._swap(policy, weights, OWN_VERSION, None)


@torch.no_grad()
def _copy_into(policy: Policy, weights: Weights) -> None:
    for name, tensor in policy.named_weights():
        tensor.copy_(weights[name])


def failure(error: Exception) -> Refusal:
    """What the client gets to know about an error of the engine."""
    if isinstance(error, Refusal):
        return error
    return Refusal(503, f"the engine failed: {error if isinstance(error, EngineError) else type(error).__name__}")
