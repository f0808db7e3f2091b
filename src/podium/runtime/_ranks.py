"""Several ranks as one: rank 0 runs the loop, the others do what it says.

    rank 0:   loop ──► RankedTrainer ──► the trainer itself
                              │ order and this rank's share, as bytes
    rank 1…:               follow ─────► the trainer itself, at the same time

A stage does not know of ranks. What is collective inside a trainer (a gradient's sum, gathering a sharded weight) meets
because every rank makes the same call. With whole weights on each rank, every rank's in-process engine also writes its
share of the rollouts.
"""

import asyncio
import contextlib
import functools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from podium.errors import EngineError, PodiumError, RankError
from podium.model.device_thread import on_device_thread
from podium.model.evidence import Held, is_among, weights_digest
from podium.model.random_state import random_state, set_random_state
from podium.records import Answer, Batch, Request, Sampling, UpdateResult
from podium.runtime import _wire as wire
from podium.stages import Engine, Trainer

LONGEST_WAIT = timedelta(days=30)
"""How long a rank waits for the next order; one whose rank 0 has died notices at once, by its connection."""

SAME = 1e-4
"""How far the logprobs of two ranks may be apart where they hold the same weights."""


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
    def order(self, name: str, payloads: Sequence[bytes] | None = None) -> Iterator[None]:
        """Tells every other rank to do it; `payloads` has one entry a rank, 0's own included. Inside, rank 0 does its
        own part."""
        if not self._lock.acquire(blocking=False):
            raise AssertionError(f"{name} was ordered before the last order was done")
        try:
            self._number += 1
            with _lost_ranks_named():
                for rank in range(1, self.ranks):
                    self._send(name.encode(), rank)
                    self._send(b"" if payloads is None else payloads[rank], rank)
                yield
        finally:
            self._lock.release()

    @property
    def has_met(self) -> bool:
        """Whether rank 0 has ordered anything yet."""
        return self._number > 0

    def note_loaded(self, policy: Any) -> None:
        """Before a trainer spreads the model over the ranks, which then have to agree on it."""
        self.loaded = weights_digest(policy.model.state_dict().items())  # buffers that are computed are not in it

    def hear(self) -> tuple[str, bytes]:
        name, content = self._receive(0).decode(), self._receive(0)
        self._number += 1
        return name, content

    def give_up(self) -> None:
        """Rank 0 does not need what it ordered last."""
        self._board.set(f"podium/given-up-{self._number}", "")

    def is_given_up(self) -> bool:
        """Whether that holds for the order that is being obeyed."""
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
    """This process's place among the ranks; each takes it once."""
    return Line()


@contextlib.contextmanager
def _lost_ranks_named() -> Iterator[None]:
    """torch raises a RuntimeError where another rank's connection closes."""
    try:
        yield
    except RankError:
        raise
    except RuntimeError as error:
        if any(word in str(error).lower() for word in ("connection", "peer", "gloo", "nccl", "timed out", "timeout")):
            raise RankError(f"a rank was lost: {str(error).splitlines()[0]}") from None
        raise


class RankedTrainer:
    """Rank 0's trainer and, through the line, the same call on every other."""

    def __init__(self, trainer: Any, line: Line) -> None:
        self._trainer, self._line = trainer, line

    async def step(self, batches: Sequence[Batch]) -> UpdateResult:
        ranks = self._line.ranks
        shares = [wire.batches_to_bytes(batches[rank::ranks]) if rank else b"" for rank in range(ranks)]
        with self._line.order("step", shares):
            return await self._trainer.step(batches[::ranks])

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        with self._line.order("score", [bytes(torch.tensor(list(token_ids)).numpy().tobytes())] * self._line.ranks):
            return await self._trainer.score(token_ids)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        with self._line.order("weights"):
            yield from self._trainer.weights()

    def state(self) -> Mapping[str, torch.Tensor]:
        """With the random states of all ranks: their batches differ, so these do too."""
        with self._line.order("state"):
            try:
                state = dict(self._trainer.state())
            finally:
                replies = self._line.replies()
        for rank, content in enumerate(replies, 1):
            state |= {f"{_of_rank(rank)}{name}": tensor for name, tensor in wire.tensors_from_bytes(content).items()}
        return state

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._load("load_state", tensors, self._trainer.load_state)

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._load("start_from", tensors, self._trainer.load_weights)

    def check_same(self, when: str) -> None:
        """Raises `RankError` unless every rank holds rank 0's weights, frozen ones included."""
        with self._line.order("digest"):
            try:
                mine = _held(self._trainer, self._line)
            finally:
                replies = self._line.replies()
        for rank, theirs in enumerate(replies, 1):
            if theirs != mine:
                raise RankError(
                    f"rank {rank} holds other weights than rank 0 {when}; every rank must read the same model: compare "
                    "the folder or the cached revision of model.name on their machines"
                )

    def _load(self, order: str, tensors: Mapping[str, torch.Tensor], load: Callable[[Any], None]) -> None:
        """On every rank. One that cannot says why, and the ranks are compared afterwards."""
        with self._line.order(order, [wire.tensors_to_bytes(tensors)] * self._line.ranks):
            try:
                load(tensors)
            finally:
                replies = self._line.replies()
        for rank, complaint in enumerate(replies, 1):
            if complaint:
                raise RankError(f"rank {rank} cannot load the weights: {complaint.decode()}")
        self.check_same("after weights were loaded")

    def save_model(self, folder: str) -> None:
        with self._line.order("weights"):
            self._trainer.save_model(folder)


def _held(trainer: Trainer, line: Line) -> bytes:
    """What this rank holds: what it loaded, and its trained weights as they are now, gathered where they are spread."""
    return line.loaded + weights_digest(trainer.weights())


def _of_rank(rank: int) -> str:
    """Before the names of what a checkpoint holds of one rank alone."""
    return f"rank-{rank}."


class RankedEngine:
    """Every rank's engine as one: each writes its share of the prompts, from its own rank's weights.

    Answers arrive when all ranks are done, so that no order comes in between.
    """

    channels = ("shared",)

    def __init__(self, engine: Engine, trainer: Trainer, line: Line) -> None:
        """`trainer` is rank 0's own, not the ranked one."""
        self._engine, self._trainer, self._line = engine, trainer, line
        self.dtype = getattr(engine, "dtype", "float32")

    @property
    def policy_version(self) -> int | None:
        return self._engine.policy_version

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Answer]:
        ranks = self._line.ranks
        shares = [wire.requests_to_bytes(requests[rank::ranks], sampling) for rank in range(ranks)]
        with self._line.order("generate", shares):
            async with self._replies() as replies:
                answers = [answer async for answer in self._engine.generate(requests[::ranks], sampling)]
            for content in replies:
                answers += wire.answers_from_bytes(content)
        by_key = {answer.key: answer for answer in answers}
        for request in requests:
            yield by_key[request.key]

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Rank 0's; a rank whose engine says something else is named."""
        ids = torch.tensor(list(token_ids)).numpy().tobytes()
        with self._line.order("engine_score", [ids] * self._line.ranks):
            async with self._replies() as replies:
                mine = await self._engine.score(token_ids)
            for rank, content in enumerate(replies, 1):
                theirs = torch.frombuffer(bytearray(content), dtype=torch.float64).tolist()
                if not max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) <= SAME:
                    raise EngineError(f"the engine of rank {rank} does not hold the weights that rank 0's holds")
        return mine

    async def held(self) -> Held:
        """Rank 0's; a rank whose engine holds something else is named."""
        with self._line.order("engine_held"):
            async with self._replies() as replies:
                mine: Held = await self._engine.held()  # type: ignore[attr-defined]
            for rank, content in enumerate(replies, 1):
                if not is_among(Held.from_json(json.loads(content)), [mine]):
                    raise EngineError(f"the engine of rank {rank} does not hold the weights that rank 0's holds")
        return mine

    @contextlib.asynccontextmanager
    async def _replies(self) -> AsyncIterator[list[bytes]]:
        """Filled at the end of the block, however it ends: a reply left behind would stand before the next order."""
        replies: list[bytes] = []
        try:
            yield replies
        except BaseException:
            self._line.give_up()
            raise
        finally:
            replies += await asyncio.shield(on_device_thread(self._line.replies))

    async def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Each rank's from its own trainer, which made the same update."""
        with self._line.order("load_weights", [str(version).encode()] * self._line.ranks):
            await self._engine.load_weights(self._trainer.weights(), version)

    async def load_folder(self, folder: Path, version: int) -> None:
        raise AssertionError("ranks share memory with their trainer")

    def close(self) -> None:
        self._engine.close()


def follow(line: Line, trainer: Any, engine: Engine | None) -> None:
    """What every rank but 0 does until it is told to end."""
    while True:
        with _lost_ranks_named():
            name, content = line.hear()
        if name == "end":
            return
        try:
            with _lost_ranks_named():
                asyncio.run(_obey(name, content, line, trainer, engine))
        except RankError:
            continue  # another rank's trouble: rank 0 knows and will say how it goes on


async def _obey(name: str, content: bytes, line: Line, trainer: Trainer, engine: Engine | None) -> None:
    if name == "step":
        await trainer.step(wire.batches_from_bytes(content))
    elif name == "score":
        await trainer.score(torch.frombuffer(bytearray(content), dtype=torch.int64).tolist())
    elif name == "weights":
        for _ in trainer.weights():
            pass
    elif name == "state":
        try:
            trainer.state()
        finally:
            line.reply(wire.tensors_to_bytes(random_state()))
    elif name in ("load_state", "start_from"):
        _load(name, wire.tensors_from_bytes(content), line, trainer)
    elif name == "digest":
        line.reply(_held(trainer, line))
    else:
        assert engine is not None
        await _obey_engine(name, content, line, trainer, engine)


def _load(name: str, tensors: Mapping[str, torch.Tensor], line: Line, trainer: Trainer) -> None:
    """Replies with what is wrong with them, or with nothing."""
    complaint = "its process failed"
    try:
        if name == "start_from":
            trainer.load_weights(tensors)
        else:
            _load_state(tensors, line.rank, trainer)
        complaint = ""
    except PodiumError as error:
        complaint = str(error)
    finally:
        line.reply(complaint.encode())


def _load_state(tensors: Mapping[str, torch.Tensor], rank: int, trainer: Trainer) -> None:
    """A checkpoint of fewer ranks holds no random state of this one: it goes on with rank 0's."""
    trainer.load_state(tensors)
    prefix = _of_rank(rank)
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if own:
        set_random_state(own)


async def _obey_engine(name: str, content: bytes, line: Line, trainer: Trainer, engine: Engine) -> None:
    if name == "generate":
        requests, sampling = wire.requests_from_bytes(content)
        answers = []
        async with contextlib.aclosing(engine.generate(requests, sampling)) as writing:  # type: ignore[type-var]
            async for answer in writing:
                answers.append(answer)
                if line.is_given_up():
                    break
        line.reply(wire.answers_to_bytes(answers))
    elif name == "engine_score":
        found = await engine.score(torch.frombuffer(bytearray(content), dtype=torch.int64).tolist())
        line.reply(torch.tensor(found, dtype=torch.float64).numpy().tobytes())
    elif name == "engine_held":
        held = await engine.held()  # type: ignore[attr-defined]
        line.reply(json.dumps(await on_device_thread(held.to_json)).encode())
    elif name == "load_weights":
        await engine.load_weights(trainer.weights(), int(content))
    else:
        raise AssertionError(f"no order is called {name}")
