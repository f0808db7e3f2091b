"""What a container keeps between tasks: the base model, an engine or a trainer, and which weights they hold.

A task may be executed twice and by any container, so each says what it needs held: a policy version, a trainer state.
What is held already is used; anything else is loaded first. So a second execution gives what the first one gave.
"""

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from podium.checkpoint_files import TENSORS, read_tensors
from podium.model.device_thread import on_device_thread
from podium.model.evidence import Held, difference
from podium.model.handoff import publish, read_published
from podium.model.load import Policy, load_policy
from podium.model.random_state import set_random_state
from podium.records import Batch, Group, Prompt, UpdateResult
from podium.reward._scoring import Scoring
from podium.runtime._build import build_scoring, check_trainer, eval_options, make_trainer
from podium.runtime._engine import coarsest_precision, make_engine, make_rollout
from podium.runtime._flyte.job import Job
from podium.runtime._flyte.sdk import Dir, flyte, storage
from podium.runtime._keep import load_start
from podium.runtime._memory import memory_plan
from podium.runtime._wire import batches_from_bytes, batches_to_bytes
from podium.settings import Settings
from podium.sync._guard import check_finite
from podium.sync._probe import Noise, check_parity

BATCHES = "batches.bin"
_held: dict[str, tuple[str, Any]] = {}
"""By kind: whose it is, and the thing. One of each: a container works for one run."""
_bases: dict[str, str] = {}
"""Where the base models that were fetched lie on this machine."""


async def held(kind: type[Any], text: str, base: Dir) -> Any:
    """This container's engine, trainer or rewards for the job; the same one for every task of the run."""
    owner, thing = _held.get(kind.__name__, ("", None))
    if owner != text:
        release(kind)
        job = Job.from_text(text)
        thing = kind(replace(job, settings=await with_base(job.settings, base)))
        _held[kind.__name__] = (text, thing)
    return thing


def release(*kinds: type[Any]) -> None:
    """Ends what is held; in local mode, where the driver is this container, a run calls it at its end."""
    for kind in kinds or (Writer, Learner, Judge):
        _, thing = _held.pop(kind.__name__, ("", None))
        if thing is not None:
            thing.close()


async def with_base(settings: Settings, base: Dir) -> Settings:
    """The settings with the model's name replaced by the folder that it was fetched to, once a container."""
    if base.is_empty:
        return settings
    if base.path not in _bases:
        _bases[base.path] = await base.download()
    return settings.model_copy(update={"model": settings.model.model_copy(update={"name": _bases[base.path]})})


async def stored(name: str, write: Callable[[Path], Any]) -> Dir:
    """A folder that `write` fills, put where every task can read it.

    The place is named here: Flyte's random paths come from Python's global random state, which a trainer's state sets,
    so that two steps could be given the same one.
    """
    place = storage.join(str(flyte.ctx().raw_data_path.path), f"{name}-{secrets.token_hex(8)}")
    with tempfile.TemporaryDirectory(prefix="podium-") as scratch:
        folder = Path(scratch) / name
        folder.mkdir()
        await asyncio.to_thread(write, folder)
        return await Dir.from_local(folder, remote_destination=place)


@asynccontextmanager
async def fetched(place: Dir) -> AsyncIterator[Path]:
    """A stored folder on this machine; what had to be fetched goes again, or a warm container's disk would fill."""
    if not storage.is_remote(place.path):
        yield Path(place.path)
        return
    with tempfile.TemporaryDirectory(prefix="podium-") as scratch:
        yield Path(await place.download(str(Path(scratch) / "folder")))


def write_batches(folder: Path, batches: Sequence[Batch]) -> None:
    """As a file: what is passed to a task as bytes, Flyte would pickle."""
    (folder / BATCHES).write_bytes(batches_to_bytes(batches))


async def read_batches(place: Dir) -> list[Batch]:
    async with fetched(place) as folder:
        return batches_from_bytes((folder / BATCHES).read_bytes())


async def read_state(place: Dir) -> dict[str, Any]:
    """A trainer's, from the file that a checkpoint has."""
    async with fetched(place) as folder:
        return await asyncio.to_thread(read_tensors, folder)


class Writer:
    """Of a rollout container: an engine over the base model, holding one policy version at a time."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._policy = load_policy(job.settings.model, seed=job.settings.run.seed)
        self._engine = make_engine(job.settings, self._policy, snapshot=False)
        self._noise = Noise(coarsest_precision(job.settings, self._engine))
        self._weights: str | None = None
        """Where the weights that it holds are stored. Their version does not tell: after a lost driver there may be
        others of the same one."""
        self._turn = asyncio.Lock()
        """A container takes one task at a time; in local mode this is what makes it so."""

    async def write(
        self, prompts: Sequence[Prompt], purpose: str, version: int, weights: Dir, expected: Sequence[float]
    ) -> list[Group]:
        """Groups of rollouts, by weights that are proven to be the trainer's: `expected` are its probe logprobs."""
        settings = self._job.settings
        options, count = (
            (eval_options(settings), settings.eval.n)
            if purpose == "eval"
            else (settings.rollout.options, settings.run.rollouts_per_prompt)
        )
        async with self._turn:
            await self._hold(version, weights, expected)
            rollout = make_rollout(settings, self._engine, self._policy, options, count, purpose)
            return [group async for group in rollout.start(prompts)]

    async def _hold(self, version: int, weights: Dir, expected: Sequence[float]) -> None:
        if self._weights == weights.path:
            return
        self._weights = None
        async with fetched(weights) as root:
            [folder] = [path for path in root.iterdir() if path.is_dir()]
            await self._engine.load_folder(folder, version)
            said = _Said(self._policy, folder, version, expected)
            await check_parity(said, self._engine, self._job.probe, version, self._noise, said.difference)  # type: ignore[arg-type]
        self._weights = weights.path

    def close(self) -> None:
        self._engine.close()


@dataclass(frozen=True)
class _Said:
    """A trainer elsewhere, as far as the checks after a push ask it."""

    policy: Policy
    folder: Path
    """Where its weights were published."""
    version: int
    logprobs: Sequence[float]

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return list(self.logprobs)

    async def difference(self, held: Held) -> str | None:
        expected = dict(self.policy.named_weights())
        weights = await asyncio.to_thread(read_published, self.folder, expected, self.version)
        scale = None if self.policy.peft is None else self.policy.adapter_scale
        return await on_device_thread(difference, weights.items(), held, scale)


@dataclass(frozen=True)
class Step:
    """A trainer after a step, or as it began: all that the next task, and the engines, need of it."""

    state: Dir
    """Weights, optimizer and random states, in the file that a checkpoint has."""
    weights: Dir
    """Published for engines."""
    probe_logprobs: list[float]


class Learner:
    """Of a trainer container: the trainer, holding one state at a time."""

    def __init__(self, job: Job) -> None:
        self._job, settings = job, job.settings
        check_trainer(settings)
        self._policy = load_policy(settings.model, seed=settings.run.seed)
        self.base_digest = self._policy.base_digest()
        self.memory = memory_plan(settings, self._policy, job.longest_prompt)
        plan = replace(settings.plan, steps=job.steps)
        self._trainer = make_trainer(settings, self._policy, plan, self.memory)
        load_start(settings, self._policy, self._trainer)
        self._state: str | None = None
        """Where the state that it holds is stored; None while it is between two."""
        self._tensors: dict[str, Any] = {}
        self.is_new = True
        """Whether it is still as a run starts."""

    async def begin(self) -> Step:
        """As the run starts."""
        assert self.is_new
        return await self._described(0, 0, None)

    async def describe(self, state: Dir, step: int, version: int) -> Step:
        """Of a restored state."""
        await self._hold(state)
        return await self._described(step, version, state)

    async def step(self, state: Dir, batches: Sequence[Batch], step: int, version: int) -> tuple[UpdateResult, Step]:
        """`step` and `version` are those that an update makes; from the same state it makes the same one."""
        await self._hold(state)
        self._state, self.is_new = None, False
        result = await self._trainer.step(batches)
        return result, await self._described(step, version, None)

    async def save(self, state: Dir) -> Dir:
        await self._hold(state)
        return await stored("model", lambda folder: self._trainer.save_model(str(folder)))

    async def _hold(self, state: Dir) -> None:
        if self._state == state.path:
            set_random_state(self._tensors)  # others may have drawn from it meanwhile
            return
        self._state, self.is_new = None, False
        self._tensors = await read_state(state)
        await on_device_thread(self._trainer.load_state, self._tensors)
        self._state = state.path

    async def _described(self, step: int, version: int, state: Dir | None) -> Step:
        await on_device_thread(check_finite, self._trainer.weights(), f"after step {step}")
        if state is None:
            self._tensors = await asyncio.to_thread(self._trainer.state)
            state = await stored(f"state-{step:06d}", lambda folder: save_file(self._tensors, folder / TENSORS))
        weights = await stored(
            f"weights-{version:06d}",
            lambda folder: publish(folder, self._policy, self._trainer.weights(), version),
        )
        logprobs = await self._trainer.score(self._job.probe)
        self._state = state.path
        return Step(state, weights, logprobs)

    def close(self) -> None:
        """Nothing is held that does not go with the object."""


class Judge:
    """Of a reward container: the run's rewards."""

    def __init__(self, job: Job) -> None:
        rows: Any = _RowNames(frozenset(job.reward_choices))
        self.scoring: Scoring = build_scoring(job.settings, [rows], all_rows=False)

    def close(self) -> None:
        self.scoring.close()


@dataclass(frozen=True)
class _RowNames:
    """The data as far as rewards must know it here: which of them the rows name. The driver has checked the rows."""

    reward_choices: frozenset[tuple[str, ...]]
    rows: tuple[Any, ...] = ()
    row_names: tuple[str, ...] = ()
