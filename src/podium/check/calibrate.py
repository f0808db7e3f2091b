"""How fast this machine is, measured: which engine is taken for a name such as "auto", and how long a step will take.

Each candidate engine generates rollouts for this run's own prompts, in a process of its own that ends with its
measurement, so no memory and no threads of the other engines stay behind. For a step's time, as many rollouts as a step
has are generated, with a few tokens each, and trained on. Sampling time grows with the length of answers and training
time with tokens, so both can be estimated for answers of any length.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import islice
from typing import Any
from uuid import uuid4

from podium.data.build import OrderedData, build_data, read_sources
from podium.engine.build import cpu_team, fitted, hand_over, make_engine
from podium.errors import InputError
from podium.loss.build import build_objective
from podium.model.load import Policy, load_policy
from podium.pack import build_pack
from podium.records import Group, PrefixGroup, Prompt, Request, Rollout, Sampling
from podium.remote.fork_server import BlockingChild, DiedError, ForkServer, RemoteError
from podium.runtime.ranks.launch import check_ranks
from podium.runtime.wiring.memory import MemoryPlan, memory_plan
from podium.runtime.wiring.trainer import start_reference, train_step
from podium.settings.lookup import engine_traits
from podium.settings.tables import Settings
from podium.stages import Engine
from podium.trainer.build import build_trainer

MAX_ROLLOUTS = 256
MAX_TOKENS = 128
"""Longest rollout of an engine's measurement."""
MAX_TRAINED_TOKENS = 16
"""Longest rollout of a step's measurement."""
MAX_S = 900.0
"""Limit for one candidate, including its start; compiling and capturing a large model takes minutes."""
TRIES = 3
"""Measurements, of which the fastest counts: a machine is sometimes slower, never faster."""
CLEARLY = 1.1
"""Factor by which another engine must be faster than the first."""


@dataclass(frozen=True)
class Candidate:
    """An engine, its measurement, or why it cannot be used."""

    name: str
    tokens_per_s: float = 0.0
    failure: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.failure or f'{self.tokens_per_s:,.0f} tokens/s'}"


def choose_engine(settings: Settings) -> tuple[Settings, str]:
    """The settings with the engine that is taken, if their engine has candidates, and a sentence for people."""
    asked, names = settings.engine.name, settings.engine_traits.candidates
    if not names:
        return settings, ""
    refuse_elsewhere(settings)
    possible = [_refused(settings, name) or Candidate(name) for name in names]
    if sum(not each.failure for each in possible) > 1:
        possible = [each if each.failure else measure(settings, each.name) for each in possible]
    if all(each.failure for each in possible):
        raise InputError(f"engine.name = {asked!r}: no engine can be used; " + "; ".join(map(str, possible)))
    chosen = pick(possible)
    others = "; ".join(str(each) for each in possible if each is not chosen)
    speed = f" ({chosen.tokens_per_s:,.0f} tokens/s)" if chosen.tokens_per_s else ""
    return with_engine(settings, chosen.name), f"engine {chosen.name} was chosen{speed}; {others}"


def refuse_elsewhere(settings: Settings) -> None:
    """Raises `InputError` if the engine is to be chosen, and the run's engines are not on this machine."""
    candidates = settings.engine_traits.candidates
    if candidates and settings.runtime.name != "local":
        raise InputError(
            f"engine.name = {settings.engine.name!r} measures on this machine, and with runtime.name = "
            f"{settings.runtime.name!r} engines are elsewhere; name one: {', '.join(candidates)}"
        )


def pick(candidates: list[Candidate]) -> Candidate:
    """The first candidate that works (`inprocess` takes the least memory), unless another is clearly faster."""
    working = [each for each in candidates if not each.failure]
    first, fastest = working[0], max(working, key=lambda each: each.tokens_per_s)
    return fastest if fastest.tokens_per_s > CLEARLY * first.tokens_per_s else first


def without_auto(settings: Settings) -> Settings:
    """The settings with the first candidate, if their engine has any, for work too short to measure engines."""
    candidates = settings.engine_traits.candidates
    return with_engine(settings, candidates[0]) if candidates else settings


def with_engine(settings: Settings, name: str) -> Settings:
    """The same settings with another engine and the defaults of its options."""
    return Settings.from_dict({**settings.to_dict(), "engine": {"name": name}})


def measure(settings: Settings, name: str) -> Candidate:
    """Measures in a process of its own; any error there is the candidate's failure."""
    with tempfile.TemporaryFile() as output:
        server = ForkServer(f"{__name__}:Calibration", {}, is_shared=False, start_s=MAX_S, output=output.fileno())
        try:
            with closing(BlockingChild(server)) as child:
                content = json.dumps(with_engine(settings, name).to_dict()).encode()
                return Candidate(**json.loads(child.call("measure", content, MAX_S)))
        except TimeoutError:
            return Candidate(name, failure=f"not ready within {MAX_S:.0f} s")
        except DiedError as death:
            output.seek(0)
            last = (output.read().decode(errors="replace").strip().splitlines() or [str(death)])[-1]
            return Candidate(name, failure=f"does not start ({last})")
        except RemoteError as error:
            return Candidate(name, failure=f"does not start ({error})")


class Calibration:
    """Runs in the process that measures. Takes settings and replies with a candidate, both as JSON."""

    def measure(self, content: bytes, reply: Callable[[bytes], None]) -> None:
        settings = Settings.from_dict(json.loads(content))
        with cpu_team(settings):
            reply(json.dumps(asdict(asyncio.run(try_out(settings)))).encode())


def _refused(settings: Settings, name: str) -> Candidate | None:
    """The candidate with its failure, if it is known without trying."""
    for package in engine_traits(name).packages:
        if find_spec(package) is None:
            return Candidate(name, failure=f"{package} is not installed")
    try:
        check_ranks(with_engine(settings, name), settings.runtime.options.get("ranks", 1))
    except InputError as error:
        return Candidate(name, failure=str(error))
    return None


async def try_out(settings: Settings) -> Candidate:
    """Tokens per second of the settings' engine; nothing is trained."""
    name = settings.engine.name
    policy = load_policy(settings.model, seed=settings.run.seed)
    data = build_data(settings, read_sources(settings.data), policy, settings.plan)
    memory = memory_plan(settings, policy, max(data.lengths))
    if not memory.fits:
        return Candidate(name, failure="it does not fit into memory next to the trainer")
    prompts = some_of(settings, data.in_order(settings.run.prompts_per_step))
    tokens = min(settings.rollout.options.get("max_new_tokens", MAX_TOKENS), MAX_TOKENS)
    async with loaded_engine(settings, policy, data, memory) as engine:
        await sampled(settings, engine, prompts, tokens)  # compiles, captures, allocates
        seconds = min([(await sampled(settings, engine, prompts, tokens))[0] for _ in range(TRIES)])
    return Candidate(name, len(prompts) * settings.run.rollouts_per_prompt * tokens / seconds)


@asynccontextmanager
async def loaded_engine(
    settings: Settings, policy: Policy, data: OrderedData, memory: MemoryPlan
) -> AsyncIterator[Engine]:
    """The settings' engine with the policy's weights, and with memory reserved for a trainer."""
    fitting, snapshot = fitted(settings, max(data.lengths)), settings.plan.needs_snapshot
    with closing(make_engine(fitting, policy, snapshot=snapshot, cache_bytes=memory.cache_limit)) as engine:
        await hand_over(settings, engine, policy, f"check-{uuid4().hex[:12]}")
        yield engine


@dataclass(frozen=True)
class StepTiming:
    """The measured seconds, and what was measured."""

    rollouts: int
    tokens: int
    """Per rollout."""
    prompt_tokens: float
    """Mean per prompt."""
    first_token_s: float
    """Reading the prompts and generating the first token of every rollout."""
    sample_s: float
    """Generating all tokens."""
    train_s: float
    """One trainer step on the rollouts, after a first that is not measured."""

    def sampling_s(self, rollouts: int, length: float) -> float:
        """Seconds to sample that many rollouts of that length."""
        per_token = max(0.0, self.sample_s - self.first_token_s) / max(1, self.tokens - 1)
        return (self.first_token_s + per_token * (length - 1)) * rollouts / self.rollouts

    def training_s(self, rollouts: int, length: float) -> float:
        """Seconds to train on that many rollouts of that length, in proportion to their tokens."""
        per_token = self.train_s / (self.rollouts * (self.prompt_tokens + self.tokens))
        return per_token * rollouts * (self.prompt_tokens + length)


async def time_step(
    settings: Settings, policy: Policy, engine: Engine, prompts: Sequence[Prompt], memory: MemoryPlan
) -> StepTiming:
    """`prompts` are at most those of a step. The engine must have answered before, so that no one-time work counts.

    Changes the policy's weights, so the policy must not be used afterwards.
    """
    some = some_of(settings, prompts)
    tokens = min(settings.rollout.options.get("max_new_tokens", MAX_TRAINED_TOKENS), MAX_TRAINED_TOKENS)
    first_token_s, _ = await sampled(settings, engine, some, 1)
    sample_s, groups = await sampled(settings, engine, some, tokens)
    objective, checkpointing = build_objective(settings), memory.gradient_checkpointing
    trainer = build_trainer(settings, policy, objective, settings.plan.steps, checkpointing)
    batches = build_pack(settings, memory.max_tokens_per_batch)(groups)
    reference = start_reference(settings)
    try:
        await train_step(trainer, reference, None, batches)  # compiles and allocates
        started = time.perf_counter()
        await train_step(trainer, reference, None, batches)
        train_s = time.perf_counter() - started
    finally:
        if reference is not None:
            reference.close()
    mean = sum(len(prompt.token_ids) for prompt in some) / len(some)
    return StepTiming(len(some) * settings.run.rollouts_per_prompt, tokens, mean, first_token_s, sample_s, train_s)


def some_of(settings: Settings, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """The first prompts: more than `MAX_ROLLOUTS` rollouts are not worth the time."""
    return prompts[: max(1, MAX_ROLLOUTS // settings.run.rollouts_per_prompt)]


async def sampled(
    settings: Settings, engine: Engine, prompts: Sequence[Prompt], tokens: int
) -> tuple[float, list[Group]]:
    """The seconds, and groups in which half of the rewards are 1. No token ends a rollout: all have the same length."""
    count = settings.run.rollouts_per_prompt
    sampling = Sampling(tokens, settings.rollout.options.get("temperature", 1.0))
    requests = [
        Request(prompt.token_ids, sampling, seed, PrefixGroup(f"timing/{prompt.ordinal}", count))
        for prompt in prompts
        for seed in range(1, count + 1)
    ]
    started = time.perf_counter()
    answers = iter(await asyncio.gather(*(engine.generate(request) for request in requests)))
    seconds = time.perf_counter() - started
    rewards: Any = tuple(float(index % 2) for index in range(count))
    advantages = tuple(2 * reward - 1 for reward in rewards)
    groups = []
    for prompt in prompts:
        rollouts = tuple(
            Rollout(a.token_ids, a.logprobs, (1,) * len(a.token_ids), "length", "", 0, 0, index, 0, a.digest)
            for index, a in enumerate(islice(answers, count))
        )
        groups.append(Group(prompt, rollouts, rewards=rewards, advantages=advantages))
    return seconds, groups
