"""`engine.name = "auto"`: each candidate generates rollouts for this run's own prompts, and the fastest is used.

In: settings. Out: settings with an engine's name, and the reason. Every candidate runs in a process of its own that
ends with its measurement, so no memory and no threads of the other engines stay behind.
"""

import asyncio
import json
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.util import find_spec

from podium.check.timing import sampled, some_of
from podium.data.build import build_data, read_sources
from podium.engine.auto import CANDIDATES
from podium.engine.build import cpu_team, fitted, hand_over, make_engine
from podium.errors import InputError
from podium.model.load import load_policy
from podium.remote.fork_server import BlockingChild, DiedError, ForkServer, RemoteError
from podium.runtime.ranks.launch import check_ranks
from podium.runtime.wiring.memory import memory_plan
from podium.settings.lookup import engine_traits
from podium.settings.tables import Settings

MOST_TOKENS = 128
"""Longest rollout of a measurement."""
MAX_S = 900.0
"""Limit for one candidate, including its start; compiling and capturing a large model takes minutes."""
TRIES = 3
"""Measurements, of which the fastest counts: a machine is sometimes slower, never faster."""
CLEARLY = 1.1
"""Factor by which another engine must be faster than the first."""


@dataclass(frozen=True)
class Candidate:
    """An engine and its measurement."""

    name: str
    tokens_per_s: float = 0.0
    failure: str = ""
    """Why the engine cannot be used; else empty."""

    def __str__(self) -> str:
        return f"{self.name}: {self.failure or f'{self.tokens_per_s:,.0f} tokens/s'}"


def choose_engine(settings: Settings) -> tuple[Settings, str]:
    """The settings with an engine's name in place of `auto`, and a sentence for people."""
    if settings.engine.name != "auto":
        return settings, ""
    if settings.runtime.name != "local":
        raise InputError(
            f"engine.name = 'auto' measures on this machine, and with runtime.name = {settings.runtime.name!r} engines "
            f"are elsewhere; name one: {', '.join(CANDIDATES)}"
        )
    possible = [_refused(settings, name) or Candidate(name) for name in CANDIDATES]
    if sum(not each.failure for each in possible) > 1:
        possible = [each if each.failure else measure(settings, each.name) for each in possible]
    chosen = pick(possible)
    others = "; ".join(str(each) for each in possible if each is not chosen)
    speed = f" ({chosen.tokens_per_s:,.0f} tokens/s)" if chosen.tokens_per_s else ""
    return with_engine(settings, chosen.name), f"engine {chosen.name} is taken{speed}; {others}"


def pick(candidates: list[Candidate]) -> Candidate:
    """The first candidate that works (`inprocess` takes the least memory), unless another is clearly faster."""
    working = [each for each in candidates if not each.failure]
    if not working:
        raise InputError("engine.name = 'auto': none can be taken; " + "; ".join(map(str, candidates)))
    first, fastest = working[0], max(working, key=lambda each: each.tokens_per_s)
    return fastest if fastest.tokens_per_s > CLEARLY * first.tokens_per_s else first


def without_auto(settings: Settings) -> Settings:
    """The settings with the first candidate in place of `auto`, for work too short to measure engines."""
    return with_engine(settings, CANDIDATES[0]) if settings.engine.name == "auto" else settings


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
    """Runs in the process that measures."""

    def measure(self, content: bytes, reply: Callable[[bytes], None]) -> None:
        """Takes settings and replies with a candidate, both as JSON."""
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
    """Tokens per second of the settings' engine, with memory reserved for a trainer; nothing is trained."""
    name = settings.engine.name
    policy = load_policy(settings.model, seed=settings.run.seed)
    data = build_data(settings, read_sources(settings.data), policy, settings.plan)
    memory = memory_plan(settings, policy, max(data.lengths))
    if not memory.fits:
        return Candidate(name, failure="there is no room for it beside the trainer")
    prompts = some_of(settings, data.in_order(settings.run.prompts_per_step))
    tokens = min(settings.rollout.options.get("max_new_tokens", MOST_TOKENS), MOST_TOKENS)
    with closing(
        make_engine(
            fitted(settings, max(data.lengths)),
            policy,
            snapshot=settings.plan.needs_snapshot,
            cache_bytes=memory.cache_limit,
        )
    ) as engine:
        await hand_over(settings, engine, policy, "calibration")
        await sampled(settings, engine, prompts, tokens)  # compiles, captures, allocates
        seconds = min([(await sampled(settings, engine, prompts, tokens))[0] for _ in range(TRIES)])
    return Candidate(name, len(prompts) * settings.run.rollouts_per_prompt * tokens / seconds)
