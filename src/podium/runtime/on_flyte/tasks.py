"""The tasks of a run, and what a container keeps between them: an engine, a trainer or the rewards.

A task may be executed twice and by any container, so each task names what it needs: its run, a policy version, a
trainer state. If the container holds that already, it is used; otherwise it is loaded first. A second execution
therefore gives the same result as the first.

A `PodiumError` is final and fails the run. Lost engines and unknown errors are tried again.
"""

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import save_file

from podium.engine.build import make_engine
from podium.errors import EngineError, PodiumError
from podium.model.device_thread import on_device_thread, set_random_state
from podium.model.evidence import Held, difference
from podium.model.handoff import read_published
from podium.model.load import Policy, load_policy
from podium.records import Batch, Group, Prompt, UpdateResult
from podium.remote.codec import decode, from_json, to_json
from podium.reward.build import ScoringRecipe
from podium.reward.scoring.stage import Scoring
from podium.rollout.build import make_rollout_for
from podium.run.checkpoint import TENSORS, read_tensors
from podium.runtime import on_flyte as where
from podium.runtime.on_flyte import Dir, errors, flyte, storage
from podium.runtime.ranks.launch import error_called
from podium.runtime.wiring.memory import MemoryPlan
from podium.runtime.wiring.trainer import HostedTrainer
from podium.settings.tables import Settings
from podium.sync import check_parity
from podium.sync.build import rounding
from podium.trainer.build import check_trainer

T = TypeVar("T")
BATCHES = "batches.bin"
"""Batches are a file: Flyte would pickle bytes that are passed to a task."""
_bases: dict[str, str] = {}
"""Base models that were fetched: from where they are stored to their folder on this machine."""


@dataclass(frozen=True)
class Job:
    """What every task is given. It travels as JSON, which people can read in Flyte."""

    run_id: str
    settings: Settings
    steps: int
    """Of the whole run."""
    longest_prompt: int
    """In tokens."""
    probe: tuple[int, ...]
    """Ids whose logprobs prove that an engine holds the trainer's weights."""
    scoring: ScoringRecipe


@dataclass(frozen=True)
class Reply:
    """What a task returns of its trainer, besides the folders of its state and weights."""

    probe_logprobs: tuple[float, ...]
    result: UpdateResult | None = None
    """Of a step."""
    memory: MemoryPlan | None = None
    """Known when the run begins."""
    base_digest: str | None = None
    """Of the weights under the adapter; known when the run begins."""


Sent = tuple[str, Dir, Dir]
"""A `Reply` as JSON; the trainer's state (weights, optimizer and random states, in the file that a checkpoint has); and
its weights, published for engines."""
_held: dict[Callable[[Job], Any], tuple[str, Any]] = {}
"""By what made it: the job it was made for, and the object. One of each kind: a container works for one run."""


@contextmanager
def final_if_named() -> Iterator[None]:
    try:
        yield
    except EngineError:
        raise
    except PodiumError as error:
        raise errors.NonRecoverableError(str(error), code=type(error).__name__) from error


def as_podium_error(error: errors.BaseRuntimeError, task: str) -> PodiumError:
    """The reverse of `final_if_named`, for who sent the task."""
    return error_called(error.code, str(error)) or EngineError(
        f"the task {task} failed for good: {error.code}: {error}; LOG_LEVEL=error shows what Flyte says"
    )


@where.rollout_environment.task(**where.IN_PODIUM)
async def write_rollouts(
    job: str, base: Dir, step: int, purpose: str, prompts: str, version: int, weights: Dir, probe_logprobs: list[float]
) -> str:
    """Groups of rollouts by the weights of `version`."""
    async with held(Writer, job, base) as writer:
        groups = await writer.write(from_json(list[Prompt], prompts), purpose, version, weights, probe_logprobs)
        return to_json(groups, list[Group])


@where.reward_environment.task(**where.IN_PODIUM)
async def score_group(job: str, step: int, group: str) -> str:
    """One group with its rewards."""
    async with held(scoring_of, job, Dir.empty()) as scoring:
        return to_json(await scoring.score(from_json(Group, group)))


@where.trainer_environment.task(**where.IN_PODIUM)
async def open_trainer(job: str, base: Dir, step: int, version: int, state: Dir) -> Sent:
    """The trainer at the start of the run; with a `state`, as it was restored."""
    if state.is_empty:
        release(Learner)  # of a warm container whose driver was lost
    async with held(Learner, job, base) as learner:
        return await learner.begin(state, step, version)


@where.trainer_environment.task(**where.IN_PODIUM)
async def train_step(job: str, base: Dir, step: int, version: int, state: Dir, batches: Dir) -> Sent:
    """One optimizer step from `state`; its update makes `version`."""
    async with held(Learner, job, base) as learner:
        async with fetched(batches) as folder:
            given = decode(list[Batch], (folder / BATCHES).read_bytes())
        return await learner.step(state, given, step, version)


@where.trainer_environment.task(**where.IN_PODIUM)
async def save_model(job: str, base: Dir, step: int, state: Dir) -> Dir:
    """The trained model: an adapter folder or a model folder."""
    async with held(Learner, job, base) as learner:
        return await learner.save(state)


@where.driver_environment.task(cache="auto", **where.IN_PODIUM)
async def fetch_model(name: str) -> Dir:
    """A model of the hub, fetched once for all containers and runs."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py"])
    return await Dir.from_local(folder)


@asynccontextmanager
async def held(make: Callable[[Job], T], text: str, base: Dir) -> AsyncIterator[T]:
    """This container's engine, trainer or rewards for the job; the same one for every task of the run."""
    with final_if_named():
        owner, _ = _held.get(make, ("", None))
        if owner != text:
            release(make)
            job = from_json(Job, text)
            _held[make] = (text, make(replace(job, settings=await with_base(job.settings, base))))
        yield _held[make][1]


def release(*makers: Callable[[Job], Any]) -> None:
    """Ends what is held, or only what these made. In local mode the driver is this container, and a run calls this at
    its end."""
    for make in makers or list(_held):
        _, thing = _held.pop(make, ("", None))
        if hasattr(thing, "close"):
            thing.close()


async def with_base(settings: Settings, base: Dir) -> Settings:
    """The settings with the model's name replaced by its folder here; a container fetches the model once."""
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
    """A stored folder on this machine. A fetched copy is removed afterwards, or a warm container's disk would fill."""
    if not storage.is_remote(place.path):
        yield Path(place.path)
        return
    with tempfile.TemporaryDirectory(prefix="podium-") as scratch:
        yield Path(await place.download(str(Path(scratch) / "folder")))


async def read_state(place: Dir) -> dict[str, Any]:
    """A trainer's state, from a file like that of a checkpoint."""
    async with fetched(place) as folder:
        return await asyncio.to_thread(read_tensors, folder)


class Writer:
    """In a rollout container: an engine over the base model, which holds one policy version at a time."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._policy = load_policy(job.settings.model, seed=job.settings.run.seed)
        self._engine = make_engine(job.settings, self._policy, snapshot=False)
        self._noise = rounding(job.settings, self._engine)
        self._weights: str | None = None
        """Where the weights that it holds are stored. Their version is not enough: after a lost driver there may be
        other weights of the same version."""
        self._turn = asyncio.Lock()
        """A container takes one task at a time; in local mode this lock ensures it."""

    async def write(
        self, prompts: Sequence[Prompt], purpose: str, version: int, weights: Dir, expected: Sequence[float]
    ) -> list[Group]:
        """Groups of rollouts by weights that are proven to be the trainer's: `expected` are its probe logprobs."""
        async with self._turn:
            await self._hold(version, weights, expected)
            with closing(make_rollout_for(self._job.settings, self._engine, self._policy, purpose)) as rollout:
                return [group async for group in rollout.start(prompts)]

    async def _hold(self, version: int, weights: Dir, expected: Sequence[float]) -> None:
        if self._weights == weights.path:
            return
        self._weights = None
        async with fetched(weights) as root:
            [folder] = [path for path in root.iterdir() if path.is_dir()]
            await self._engine.load_folder(folder, version)
            trainer: Any = _Published(self._policy, folder, version, expected)
            await check_parity(trainer, self._engine, self._job.probe, version, self._noise, trainer.difference)
        self._weights = weights.path

    def close(self) -> None:
        self._engine.close()


@dataclass(frozen=True)
class _Published:
    """Takes the place of the trainer, which is in another container, in the checks after a push."""

    policy: Policy
    folder: Path
    """The trainer's published weights."""
    version: int
    logprobs: Sequence[float]
    """The trainer's, for the probe."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return list(self.logprobs)

    async def difference(self, held: Held) -> str | None:
        expected = dict(self.policy.named_weights())
        weights = await asyncio.to_thread(read_published, self.folder, expected, self.version)
        scale = None if self.policy.peft is None else self.policy.adapter_scale
        return await on_device_thread(difference, weights.items(), held, scale)


class Learner(HostedTrainer):
    """In a trainer container: the trainer, which holds one state at a time."""

    def __init__(self, job: Job) -> None:
        check_trainer(job.settings)
        super().__init__(job.settings)
        self.build(job.steps, job.longest_prompt)
        self.load_start()
        self._probe = job.probe
        self._state: str | None = None
        """Where the state that it holds is stored; None while a step changes it."""
        self._tensors: dict[str, Any] = {}

    async def begin(self, state: Dir, step: int, version: int) -> Sent:
        """As the run starts, or as restored from `state`."""
        if not state.is_empty:
            await self._hold(state)
        return await self._described(step, version, state, memory=self.memory, base_digest=self.base_digest)

    async def step(self, state: Dir, batches: Sequence[Batch], step: int, version: int) -> Sent:
        """`step` and `version` are those that an update makes; from the same state it makes the same one."""
        await self._hold(state)
        self._state = None
        result = await self.trainer.step(batches)
        return await self._described(step, version, Dir.empty(), result=result)

    async def save(self, state: Dir) -> Dir:
        await self._hold(state)
        return await stored("model", lambda folder: self.trainer.save_model(str(folder)))

    async def _hold(self, state: Dir) -> None:
        if self._state == state.path:
            set_random_state(self._tensors)  # others may have drawn from it meanwhile
            return
        self._state = None
        self._tensors = await read_state(state)
        await on_device_thread(self.trainer.load_state, self._tensors)
        self._state = state.path

    async def _described(self, step: int, version: int, state: Dir, **facts: Any) -> Sent:
        """Stores the state, unless it is stored already, and the weights; `facts` are further fields of the reply."""
        await self.check_finite(f"after step {step}")
        if state.is_empty:
            self._tensors = await asyncio.to_thread(self.trainer.state)
            state = await stored(f"state-{step:06d}", lambda folder: save_file(self._tensors, folder / TENSORS))
        weights = await stored(f"weights-{version:06d}", lambda folder: self.publish(folder, version))
        logprobs = await self.trainer.score(self._probe)
        self._state = state.path
        return to_json(Reply(tuple(logprobs), **facts)), state, weights


def scoring_of(job: Job) -> Scoring:
    """In a reward container: the run's rewards."""
    return job.scoring.build()
