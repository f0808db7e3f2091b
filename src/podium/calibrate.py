"""`engine.name = "auto"`: each candidate writes rollouts to this run's own prompts, and the fastest is taken.

In: settings. Out: settings with an engine's name, and why. Every candidate starts in a process of its own that ends
with its measurement: nothing of an engine that is not taken, neither memory nor threads, stays behind.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from podium.engine.auto import CANDIDATES
from podium.errors import InputError
from podium.model.load import load_policy
from podium.processes import die_with_parent
from podium.runtime._build import build_data, read_sources
from podium.runtime._core import check_ranks
from podium.runtime._engine import cpu_team, fitted, hand_over, make_engine
from podium.runtime._memory import memory_plan
from podium.settings import Settings
from podium.timing import sampled, some_of

MOST_TOKENS = 128
"""Of a rollout that is written to measure."""
MAX_S = 900.0
"""For one candidate, from its start; compiling and capturing a large model takes minutes."""
TRIES = 3
"""The best counts: a machine is now and then slower, never faster."""
CLEARLY = 1.1
PACKAGES = {"vllm_local": "vllm"}


@dataclass(frozen=True)
class Candidate:
    """An engine and what was found out about it."""

    name: str
    tokens_per_s: float = 0.0
    failure: str = ""
    """Why it cannot be taken; else empty."""

    def __str__(self) -> str:
        return f"{self.name}: {self.failure or f'{self.tokens_per_s:,.0f} tokens/s'}"


def choose_engine(settings: Settings) -> tuple[Settings, str]:
    """The settings with an engine's name in place of `auto`, and a sentence for people; others stay as they are."""
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
    """The fastest that works; `inprocess`, which takes the least memory, unless another is clearly so."""
    working = [each for each in candidates if not each.failure]
    if not working:
        raise InputError("engine.name = 'auto': none can be taken; " + "; ".join(map(str, candidates)))
    first, fastest = working[0], max(working, key=lambda each: each.tokens_per_s)
    return fastest if fastest.tokens_per_s > CLEARLY * first.tokens_per_s else first


def without_auto(settings: Settings) -> Settings:
    """For what is too short to measure for."""
    return with_engine(settings, CANDIDATES[0]) if settings.engine.name == "auto" else settings


def with_engine(settings: Settings, name: str) -> Settings:
    """The same with another engine, its options at their defaults."""
    return Settings.from_dict({**settings.to_dict(), "engine": {"name": name}})


def measure(settings: Settings, name: str) -> Candidate:
    """In a process of its own; whatever goes wrong there is the candidate's failure."""
    command = [sys.executable, "-m", "podium.calibrate", name, str(os.getpid())]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    child = subprocess.Popen(command, **pipes, text=True, start_new_session=True)
    try:
        said, complaint = child.communicate(json.dumps(settings.to_dict()), timeout=MAX_S)
    except subprocess.TimeoutExpired:
        return Candidate(name, failure=f"not ready within {MAX_S:.0f} s")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(timeout=60)
    if child.returncode:
        last = (complaint.strip().splitlines() or [f"ended with status {child.returncode}"])[-1]
        return Candidate(name, failure=f"does not start ({last})")
    return Candidate(**json.loads(said.splitlines()[-1]))


def _refused(settings: Settings, name: str) -> Candidate | None:
    """What is known without trying."""
    if name in PACKAGES and find_spec(PACKAGES[name]) is None:
        return Candidate(name, failure=f"{PACKAGES[name]} is not installed")
    try:
        check_ranks(with_engine(settings, name), settings.runtime.options.get("ranks", 1))
    except InputError as error:
        return Candidate(name, failure=str(error))
    return None


async def try_out(settings: Settings) -> Candidate:
    """Tokens a second of the engine that the settings name, beside a trainer's memory; nothing is trained."""
    name = settings.engine.name
    policy = load_policy(settings.model, seed=settings.run.seed)
    data = build_data(settings, read_sources(settings.data), policy, settings.plan)
    memory = memory_plan(settings, policy, max(data.lengths))
    if not memory.fits:
        return Candidate(name, failure="there is no room for it beside the trainer")
    prompts = some_of(settings, data.in_order(settings.run.prompts_per_step))
    tokens = min(settings.rollout.options.get("max_new_tokens", MOST_TOKENS), MOST_TOKENS)
    with closing(
        make_engine(fitted(settings, max(data.lengths)), policy, snapshot=settings.plan.needs_snapshot)
    ) as engine:
        await hand_over(settings, engine, policy, "calibration")
        await sampled(settings, engine, prompts, tokens)  # compiles, captures, allocates
        seconds = min([(await sampled(settings, engine, prompts, tokens))[0] for _ in range(TRIES)])
    return Candidate(name, len(prompts) * settings.run.rollouts_per_prompt * tokens / seconds)


def main(name: str, parent: int) -> None:
    """The child: settings from its input, one line with a candidate to its output."""
    die_with_parent(parent)
    given: dict[str, Any] = json.load(sys.stdin)
    settings = with_engine(Settings.from_dict(given), name)
    with cpu_team(settings):
        print(json.dumps(asdict(asyncio.run(try_out(settings)))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
