"""The tasks of a run. Each says which run, step and weights it is for, so that a second execution changes nothing.

Errors that Podium names are the run's answer and are not tried again; lost engines, and what nobody knows, are.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from podium.errors import EngineError, PodiumError
from podium.runtime._flyte import environments as where
from podium.runtime._flyte.job import groups_from_text, groups_to_text, prompts_from_text, result_to_plain
from podium.runtime._flyte.replica import Judge, Learner, Step, Writer, held, read_batches, release
from podium.runtime._flyte.sdk import Dir, errors


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
        groups = await writer.write(prompts_from_text(prompts), purpose, version, weights, probe_logprobs)
        return groups_to_text(groups)


@where.reward_environment.task(**where.IN_PODIUM)
async def score_group(job: str, step: int, group: str) -> str:
    """One group with its rewards."""
    with final_if_named():
        judge: Judge = await held(Judge, job, Dir.empty())
        [written] = groups_from_text(group)
        return groups_to_text([await judge.scoring.score(written)])


@where.trainer_environment.task(**where.IN_PODIUM)
async def open_trainer(job: str, base: Dir) -> tuple[str, Dir, Dir]:
    """The trainer as the run begins: its memory plan, state and published weights."""
    with final_if_named():
        learner: Learner = await held(Learner, job, base)
        if not learner.is_new:  # a warm container whose driver was lost
            release(Learner)
            learner = await held(Learner, job, base)
        return _reply(await learner.begin(), memory=asdict(learner.memory), base_digest=learner.base_digest)


@where.trainer_environment.task(**where.IN_PODIUM)
async def train_step(job: str, base: Dir, step: int, version: int, state: Dir, batches: Dir) -> tuple[str, Dir, Dir]:
    """One optimizer step from `state`; its update makes `version`."""
    with final_if_named():
        learner: Learner = await held(Learner, job, base)
        result, after = await learner.step(state, await read_batches(batches), step, version)
        return _reply(after, result=result_to_plain(result))


@where.trainer_environment.task(**where.IN_PODIUM)
async def describe_state(job: str, base: Dir, step: int, version: int, state: Dir) -> tuple[str, Dir, Dir]:
    """The published weights of a state that was restored."""
    with final_if_named():
        learner: Learner = await held(Learner, job, base)
        return _reply(await learner.describe(state, step, version))


@where.trainer_environment.task(**where.IN_PODIUM)
async def save_model(job: str, base: Dir, step: int, state: Dir) -> Dir:
    """What a user takes away: an adapter folder or a model folder."""
    with final_if_named():
        learner: Learner = await held(Learner, job, base)
        return await learner.save(state)


@where.driver_environment.task(cache="auto", **where.IN_PODIUM)
async def fetch_model(name: str) -> Dir:
    """A model of the hub, fetched once for all containers and runs."""
    from huggingface_hub import snapshot_download

    folder = snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py"])
    return await Dir.from_local(folder)


def _reply(step: Step, **others: object) -> tuple[str, Dir, Dir]:
    return json.dumps({"probe_logprobs": step.probe_logprobs, **others}), step.state, step.weights
