"""Several ranks as one: rank 0 runs the loop, and the others follow its orders.

    rank 0:   loop ──► RankedTrainer ──► the trainer itself
                              │ order and this rank's share, as bytes
    rank 1…:               follow ─────► the trainer itself, at the same time

Stages know nothing of ranks. Collective operations inside a trainer (summing gradients, gathering a sharded weight)
meet because every rank makes the same call. With whole weights on each rank, the in-process engine of every rank also
generates its share of the rollouts.
"""

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from podium.errors import EngineError, PodiumError, RankError
from podium.model.device_thread import on_device_thread, random_state, set_random_state
from podium.model.evidence import Held, is_among, weights_digest
from podium.records import Answer, Batch, Request, UpdateResult
from podium.remote.codec import decode, encode
from podium.remote.rollouts import Batching
from podium.stages import Engine, OnTokens, Trainer

LONGEST_WAIT = timedelta(days=30)
"""How long a rank waits for the next order; the death of rank 0 is noticed at once, by its closed connection."""

Tensors = dict[str, torch.Tensor]
LOOK_S = 0.5
"""Between two looks whether rank 0 still needs what it ordered."""

SAME = 1e-4
"""Largest difference between the logprobs of two ranks that hold the same weights."""


class Line:
    """Orders from rank 0 to the others, replies back. One order at a time."""

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._group: Any = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
        self._lock = threading.Lock()
        self._board = dist.distributed_c10d._get_default_store()
        self._number = 0
        """Orders so far."""
        self.loaded = b""
        """A digest of the model as this rank loaded it."""

    @contextlib.contextmanager
    def order(self, name: str, payload: bytes | Sequence[bytes] = b"") -> Iterator[None]:
        """Sends the order to every other rank; `payload` is the same for all, or has one entry per rank, including
        rank 0. Inside the block, rank 0 does its own part."""
        if not self._lock.acquire(blocking=False):
            raise AssertionError(f"{name} was ordered before the last order was done")
        try:
            self._number += 1
            with _lost_ranks_named():
                for rank in range(1, self.ranks):
                    self._send(name.encode(), rank)
                    self._send(payload if isinstance(payload, bytes) else payload[rank], rank)
                yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def question(self, name: str, payload: bytes | Sequence[bytes] = b"") -> Iterator[list[bytes]]:
        """An order to which the other ranks reply. The list is filled at the end of the block, however it ends: an
        unread reply would be taken for the next one."""
        replies: list[bytes] = []
        with self.order(name, payload):
            try:
                yield replies
            finally:
                replies += self.replies()

    @property
    def has_met(self) -> bool:
        """Whether rank 0 has ordered anything yet."""
        return self._number > 0

    def note_loaded(self, policy: Any) -> None:
        """Called before a trainer spreads the model over the ranks; the ranks compare the digests later."""
        self.loaded = weights_digest(policy.model.state_dict().items())  # computed buffers are not in it

    def hear(self) -> tuple[str, bytes]:
        name, content = self._receive(0).decode(), self._receive(0)
        self._number += 1
        return name, content

    def give_up(self) -> None:
        """Rank 0 no longer needs the result of its last order."""
        self._board.set(f"podium/given-up-{self._number}", "")

    def is_given_up(self) -> bool:
        """Whether rank 0 has given up the current order."""
        return self._board.check([f"podium/given-up-{self._number}"])

    def reply(self, content: bytes) -> None:
        self._send(content, 0)

    def replies(self) -> list[bytes]:
        return [self._receive(rank) for rank in range(1, self.ranks)]

    def _send(self, content: bytes, rank: int) -> None:
        dist.send(torch.tensor([len(content)]), rank, group=self._group)
        if content:
            dist.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), rank, group=self._group)

    def _receive(self, rank: int) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, rank, group=self._group)
        content = torch.zeros(int(length), dtype=torch.uint8)
        if len(content):
            dist.recv(content, rank, group=self._group)
        return content.numpy().tobytes()


@functools.cache
def join() -> Line:
    """This process's place among the ranks. The first call is collective: every rank makes it."""
    return Line()


@contextlib.contextmanager
def _lost_ranks_named() -> Iterator[None]:
    """Turns the RuntimeError that torch raises when a rank's connection closes into a `RankError`."""
    try:
        yield
    except RankError:
        raise
    except RuntimeError as error:
        if any(word in str(error).lower() for word in ("connection", "peer", "gloo", "nccl", "timed out", "timeout")):
            raise RankError(f"a rank was lost: {str(error).splitlines()[0]}") from None
        raise


class RankedTrainer:
    """Rank 0's trainer; each call is also made, through the line, on every other rank."""

    def __init__(self, trainer: Any, line: Line) -> None:
        self._trainer, self._line = trainer, line

    async def step(self, batches: Sequence[Batch]) -> UpdateResult:
        ranks = self._line.ranks
        shares = [encode(batches[rank::ranks], list[Batch]) if rank else b"" for rank in range(ranks)]
        with self._line.order("step", shares):
            return await self._trainer.step(batches[::ranks])

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        with self._line.order("score", encode(list(token_ids))):
            return await self._trainer.score(token_ids)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self._line.order("weights"):
            yield from self._trainer.weights()

    def state(self) -> Mapping[str, torch.Tensor]:
        """With the random states of all ranks, which differ because their batches do."""
        with self._line.question("state") as replies:
            state = dict(self._trainer.state())
        for rank, content in enumerate(replies, 1):
            state |= {f"{_of_rank(rank)}{name}": tensor for name, tensor in decode(Tensors, content).items()}
        return state

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._load("load_state", tensors, self._trainer.load_state)

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._load("start_from", tensors, self._trainer.load_weights)

    def check_same(self, when: str) -> None:
        """Raises `RankError` unless every rank holds rank 0's weights, frozen ones included."""
        with self._line.question("digest") as replies:
            mine = _held(self._trainer, self._line)
        for rank, theirs in enumerate(replies, 1):
            if theirs != mine:
                raise RankError(
                    f"rank {rank} holds other weights than rank 0 {when}; every rank must read the same model: compare "
                    "the folder or the cached revision of model.name on their machines"
                )

    def _load(self, order: str, tensors: Mapping[str, torch.Tensor], load: Callable[[Any], None]) -> None:
        """Loads on every rank. A rank that cannot load replies why; afterwards the ranks are compared."""
        with self._line.question(order, encode(tensors, Tensors)) as replies:
            load(tensors)
        for rank, complaint in enumerate(replies, 1):
            if complaint:
                raise RankError(f"rank {rank} cannot load the weights: {complaint.decode()}")
        self.check_same("after weights were loaded")

    def save_model(self, folder: str) -> None:
        with self._line.order("weights"):
            self._trainer.save_model(folder)


def _held(trainer: Trainer, line: Line) -> bytes:
    """Digests of the model as this rank loaded it and of its current trained weights, gathered if they are sharded."""
    return line.loaded + weights_digest(trainer.weights())


def _of_rank(rank: int) -> str:
    """Prefix of the names of what a checkpoint holds of one rank only."""
    return f"rank-{rank}."


class RankedEngine:
    """The engines of all ranks as one: each generates its share of the rollouts, with the weights of its own rank.

    The requests of one turn of the event loop are one order, and answers arrive when all ranks are done, so that no
    other order comes in between. Requests that come later wait for the order under way.
    """

    def __init__(self, engine: Engine, trainer: Trainer, line: Line) -> None:
        """`trainer` is rank 0's own, not the ranked one."""
        self._engine, self._trainer, self._line = engine, trainer, line
        self.traits = replace(engine.traits, channels=("shared",))
        self._batching, self._one_order = Batching(self._write), asyncio.Lock()

    @property
    def policy_version(self) -> int | None:
        return self._engine.policy_version

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Answer:
        try:
            return await self._batching.generate(request, on_tokens)
        except asyncio.CancelledError:
            await self._batching.settled()  # the next order, such as a checkpoint's, must find the line free
            raise

    def release(self, name: str) -> None:
        self._engine.release(name)

    async def _write(self, requests: list[Request]) -> AsyncGenerator[tuple[int, Answer]]:
        shares = _shares(requests, self._line.ranks)
        orders = [encode([requests[place] for place in share], list[Request]) for share in shares]
        async with self._one_order:
            async with self._question("generate", orders) as replies:
                mine = await asyncio.gather(*(self._engine.generate(requests[place]) for place in shares[0]))
            written = [mine, *(decode(list[Answer], content) for content in replies)]
        for share, answers in zip(shares, written, strict=True):
            for place, answer in zip(share, answers, strict=True):
                yield place, answer

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Rank 0's; the error names a rank whose engine answers otherwise."""
        async with self._question("engine_score", encode(list(token_ids))) as replies:
            mine = await self._engine.score(token_ids)
        scores = [decode(list[float], content) for content in replies]
        _check_same(max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) <= SAME for theirs in scores)
        return mine

    async def held(self) -> Held:
        """Rank 0's; the error names a rank whose engine holds something else."""
        async with self._question("engine_held") as replies:
            mine: Held = await self._engine.held()  # type: ignore[attr-defined]
        _check_same(is_among(decode(Held, content), [mine]) for content in replies)
        return mine

    @contextlib.asynccontextmanager
    async def _question(self, name: str, payload: bytes | Sequence[bytes] = b"") -> AsyncIterator[list[bytes]]:
        """As `Line.question`; while rank 0 waits for the replies, its event loop goes on."""
        replies: list[bytes] = []
        with self._line.order(name, payload):
            try:
                yield replies
            except BaseException:
                self._line.give_up()
                raise
            finally:
                replies += await asyncio.shield(on_device_thread(self._line.replies))

    async def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Each rank's engine loads from its own trainer, which made the same update."""
        with self._line.order("load_weights", encode(version)):
            await self._engine.load_weights(self._trainer.weights(), version)

    def close(self) -> None:
        self._engine.close()


def _check_same(are_same: Iterable[bool]) -> None:
    """One entry for each rank from 1."""
    for rank, is_same in enumerate(are_same, 1):
        if not is_same:
            raise EngineError(f"the engine of rank {rank} does not hold the weights that rank 0's holds")


def _shares(requests: Sequence[Request], ranks: int) -> list[list[int]]:
    """The places of each rank's requests; those of one prefix group are one rank's."""
    groups: dict[Any, list[int]] = {}
    for place, request in enumerate(requests):
        key = place if request.prefix_group is None else request.prefix_group.name
        groups.setdefault(key, []).append(place)
    return [[place for group in list(groups.values())[rank::ranks] for place in group] for rank in range(ranks)]


def follow(line: Line, trainer: Any, engine: Engine | None) -> None:
    """What every rank but 0 does until the order to end."""
    while True:
        with _lost_ranks_named():
            name, content = line.hear()
        if name == "end":
            return
        try:
            with _lost_ranks_named():
                asyncio.run(_obey(name, content, line, trainer, engine))
        except RankError:
            continue  # another rank failed: rank 0 knows and decides how the run goes on


async def _obey(name: str, content: bytes, line: Line, trainer: Trainer, engine: Engine | None) -> None:
    if name == "step":
        await trainer.step(decode(list[Batch], content))
    elif name == "score":
        await trainer.score(decode(list[int], content))
    elif name == "weights":
        for _ in trainer.weights():
            pass
    elif name == "state":
        try:
            trainer.state()
        finally:
            line.reply(encode(random_state(), Tensors))
    elif name in ("load_state", "start_from"):
        _load(name, decode(Tensors, content), line, trainer)
    elif name == "digest":
        line.reply(_held(trainer, line))
    else:
        assert engine is not None
        await _obey_engine(name, content, line, trainer, engine)


def _load(name: str, tensors: Mapping[str, torch.Tensor], line: Line, trainer: Trainer) -> None:
    """Replies with why the tensors cannot be loaded, or with nothing. A checkpoint of fewer ranks has no random state
    for this rank, which then continues with rank 0's."""
    complaint, prefix = "its process failed", _of_rank(line.rank)
    try:
        if name == "start_from":
            trainer.load_weights(tensors)
        else:
            trainer.load_state(tensors)
            own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            if own:
                set_random_state(own)
        complaint = ""
    except PodiumError as error:
        complaint = str(error)
    finally:
        line.reply(complaint.encode())


async def _obey_engine(name: str, content: bytes, line: Line, trainer: Trainer, engine: Engine) -> None:
    if name == "generate":
        line.reply(encode(await _written(decode(list[Request], content), line, engine), list[Answer]))
    elif name == "engine_score":
        line.reply(encode(await engine.score(decode(list[int], content)), list[float]))
    elif name == "engine_held":
        held = await engine.held()  # type: ignore[attr-defined]
        line.reply(encode(await on_device_thread(held.sealed)))
    elif name == "load_weights":
        await engine.load_weights(trainer.weights(), decode(int, content))
    else:
        raise AssertionError(f"no order is called {name}")


async def _written(requests: list[Request], line: Line, engine: Engine) -> list[Answer]:
    """This rank's answers; none once rank 0 does not need them any more."""
    writing = asyncio.ensure_future(asyncio.gather(*(engine.generate(request) for request in requests)))
    while not writing.done():
        await asyncio.wait({writing}, timeout=LOOK_S)
        if line.is_given_up():
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            return []
    return writing.result()
