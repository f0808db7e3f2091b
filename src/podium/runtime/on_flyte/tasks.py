"""The tasks of a run. Each is given its run, step and weights, so that a second execution changes nothing.

A `PodiumError` is final and fails the run. Lost engines and unknown errors are tried again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from podium.errors import EngineError, PodiumError
from podium.records import Group, Prompt
from podium.remote.codec import from_json, to_json
from podium.runtime.on_flyte import environments as where
from podium.runtime.on_flyte.replica import Judge, Learner, Reply, Step, Writer, held, read_batches, release
from podium.runtime.on_flyte.sdk import Dir, errors


@contextmanager
def final_if_named() -> Iterator[None]:
    try:
        yield
    except EngineError:
        raise
    except PodiumError as error:
        raise errors.NonRecoverableError(str(error), code=type(error).__name__) from error


@where.rollout_environment.task(**where.IN_PODIUM)
async def write_rollouts(
    job: str, base: Dir, step: int, purpose: str, prompts: str, version: int, weights: Dir, probe_logprobs: list[float]
) -> str:
    """Groups of rollouts by the weights of `version`."""
    with final_if_named():
        writer: Writer = await held(Writer, job, base)
        groups = await writer.write(from_json(list[Prompt], prompts), purpose, version, weights, probe_logprobs)
        return to_json(groups, list[Group])


@where.reward_environment.task(**where.IN_PODIUM)
async def score_group(job: str, step: int, group: str) -> str:
    """One group with its rewards."""
    with final_if_named():
        judge: Judge = await held(Judge, job, Dir.empty())
        return to_json(await judge.scoring.score(from_json(Group, group)))


@where.trainer_environment.task(**where.IN_PODIUM)
async def open_trainer(job: str, base: Dir) -> tuple[str, Dir, Dir]:
    """The trainer at the start of the run: its memory plan, state and published weights."""
    with final_if_named():
        learner: Learner = await held(Learner, job, base)
        if not learner.is_new:  # a warm container whose driver was lost
            release(Learner)
            learner = await held(Learner, job, base)
        return _reply(await learner.begin(), memory=learner.memory, base_digest=learner.base_digest)


@where.trainer_environment.task(**where.IN_PODIUM)
async def train_step(job: str, base: Dir, step: int, version: int, state: Dir, batches: Dir) -> tuple[str, Dir, Dir]:
    """One optimizer step from `state`; its update makes `version`."""
    with final_if_named():
        learner: Learner = await held(Learner, job, base)
        result, after = await learner.step(state, await read_batches(batches), step, version)
        return _reply(after, result=result)


@where.trainer_environment.task(**where.IN_PODIUM)
async def describe_state(job: str, base: Dir, step: int, version: int, state: Dir) -> tuple[str, Dir, Dir]:
    """The published weights of a state that was restored."""
    with final_if_named():
        learner: Learner = await held(Learner, job, base)
        return _reply(await learner.describe(state, step, version))


@where.trainer_environment.task(**where.IN_PODIUM)
async def save_model(job: str, base: Dir, step: int, state: Dir) -> Dir:
    """The trained model: an adapter folder or a model folder."""
    with final_if_named():
        learner: Learner = await held(Learner, job, base)
        return await learner.save(state)


@where.driver_environment.task(cache="auto", **where.IN_PODIUM)
async def fetch_model(name: str) -> Dir:
    """A model of the hub, fetched once for all containers and runs."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py"])
    return await Dir.from_local(folder)


def _reply(step: Step, **others: Any) -> tuple[str, Dir, Dir]:
    return to_json(Reply(tuple(step.probe_logprobs), **others)), step.state, step.weights
