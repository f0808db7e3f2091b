"""What a container keeps between tasks: the base model, an engine or a trainer, and which weights they hold.

A task may be executed twice and by any container, so each task names what it needs: a policy version, a trainer state.
If the container holds that already, it is used; otherwise it is loaded first. A second execution therefore gives the
same result as the first.
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

from podium.engine.build import make_engine
from podium.model.device_thread import on_device_thread, set_random_state
from podium.model.evidence import Held, difference
from podium.model.handoff import read_published
from podium.model.load import Policy, load_policy
from podium.records import Batch, Group, Prompt, UpdateResult
from podium.remote.codec import decode, encode, from_json
from podium.reward.build import ScoringRecipe
from podium.reward.scoring.stage import Scoring
from podium.rollout.build import make_rollout_for
from podium.run.checkpoint import TENSORS, read_tensors
from podium.runtime.on_flyte.sdk import Dir, flyte, storage
from podium.runtime.wiring.memory import MemoryPlan
from podium.runtime.wiring.trainer import HostedTrainer
from podium.settings.tables import Settings
from podium.sync._delivery import check_parity
from podium.sync.build import rounding
from podium.trainer.build import check_trainer

BATCHES = "batches.bin"
_held: dict[str, tuple[str, Any]] = {}
"""By kind: the job it was made for, and the object. One of each kind: a container works for one run."""
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
    """What a task of the trainer returns, next to the folders of its state and weights."""

    probe_logprobs: tuple[float, ...]
    result: UpdateResult | None = None
    """Of a step."""
    memory: MemoryPlan | None = None
    """Known when the run begins."""
    base_digest: str | None = None
    """Of the weights under the adapter; known when the run begins."""


async def held(kind: type[Any], text: str, base: Dir) -> Any:
    """This container's engine, trainer or rewards for the job; the same one for every task of the run."""
    owner, thing = _held.get(kind.__name__, ("", None))
    if owner != text:
        release(kind)
        job = from_json(Job, text)
        thing = kind(replace(job, settings=await with_base(job.settings, base)))
        _held[kind.__name__] = (text, thing)
    return thing


def release(*kinds: type[Any]) -> None:
    """Ends what is held. In local mode the driver is this container, and a run calls this at its end."""
    for kind in kinds or (Writer, Learner, Judge):
        _, thing = _held.pop(kind.__name__, ("", None))
        if thing is not None:
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


def write_batches(folder: Path, batches: Sequence[Batch]) -> None:
    """As a file: Flyte would pickle bytes that are passed to a task."""
    (folder / BATCHES).write_bytes(encode(batches, list[Batch]))


async def read_batches(place: Dir) -> list[Batch]:
    async with fetched(place) as folder:
        return decode(list[Batch], (folder / BATCHES).read_bytes())


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
            rollout = make_rollout_for(self._job.settings, self._engine, self._policy, purpose)
            return [group async for group in rollout(prompts)]

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
    """Stands for the trainer, which is in another container, in the checks after a push."""

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
    """The trainer after a step, or at the start of the run: all that the next task and the engines need of it."""

    state: Dir
    """Weights, optimizer and random states, in the file that a checkpoint has."""
    weights: Dir
    """Published for engines."""
    probe_logprobs: Sequence[float]


class Learner:
    """In a trainer container: the trainer, which holds one state at a time."""

    def __init__(self, job: Job) -> None:
        self._job = job
        check_trainer(job.settings)
        self._host = HostedTrainer(job.settings)
        self.base_digest = self._host.policy.base_digest()
        self.memory = self._host.plan_memory(job.longest_prompt)
        self._host.build(job.steps)
        self._host.load_start()
        self._trainer = self._host.trainer
        self._state: str | None = None
        """Where the state that it holds is stored; None while a step changes it."""
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
        await self._host.check_finite(f"after step {step}")
        if state is None:
            self._tensors = await asyncio.to_thread(self._trainer.state)
            state = await stored(f"state-{step:06d}", lambda folder: save_file(self._tensors, folder / TENSORS))
        weights = await stored(f"weights-{version:06d}", lambda folder: self._host.publish(folder, version))
        logprobs = await self._trainer.score(self._job.probe)
        self._state = state.path
        return Step(state, weights, logprobs)

    def close(self) -> None:
        """Nothing is held that does not go with the object."""


class Judge:
    """In a reward container: the run's rewards."""

    def __init__(self, job: Job) -> None:
        self.scoring: Scoring = job.scoring.build()

    def close(self) -> None:
        self.scoring.close()
