"""What a rollout costs the driver, by its length: bytes and CPU from the wire to the ledger, through the real code.

Answers of two lengths, so that what a token costs and what a rollout costs can be told apart.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SHORT, LONG = 100, 1100
GROUPS, ROLLOUTS = 16, 8
MEMBERS = 1000
ROUNDS = 5


def measure_driver(folder: Path) -> dict[str, float]:
    """Seconds of CPU and bytes, by the names of `Costs`."""
    from podium.model.load import load_policy
    from podium.records import Batch, StepGroups
    from podium.remote.codec import encode
    from podium.settings.sections import Model

    (folder / "rollouts").mkdir(parents=True)
    policy = load_policy(Model(name="embedded", device="cpu"), seed=0)
    by_length: dict[int, dict[str, float]] = {}
    for tokens in (SHORT, LONG):
        lines = [_line(key, tokens, policy.vocabulary) for key in range(GROUPS * ROLLOUTS)]
        groups = _groups(lines, policy)
        step = StepGroups(GROUPS).plus(groups, groups)
        batches = _packed(groups)
        by_length[tokens] = {
            "receive": _quickest(lambda lines=lines: _groups(lines, policy)),
            "pack": _quickest(lambda groups=groups: _packed(groups)),
            "order": _quickest(lambda batches=batches: encode(batches, list[Batch])),
            "report": _quickest(lambda step=step: _report(folder, step)),
            "bytes": sum(map(len, lines)),
        }
    rollouts = GROUPS * ROLLOUTS
    per_token = {
        name: (by_length[LONG][name] - by_length[SHORT][name]) / (LONG - SHORT) / rollouts for name in by_length[SHORT]
    }
    short = by_length[SHORT]
    return {
        "receive_token_s": per_token["receive"],
        "receive_rollout_s": max(0.0, short["receive"] / rollouts - SHORT * per_token["receive"]),
        "pack_token_s": per_token["pack"],
        "order_token_s": per_token["order"],
        "report_token_s": per_token["report"],
        "report_rollout_s": max(0.0, short["report"] / rollouts - SHORT * per_token["report"]),
        "token_bytes": per_token["bytes"],
        "route_s": _route_s(),
    }


def _line(key: int, tokens: int, vocabulary: int) -> str:
    """The answer to one rollout as a server sends it."""
    from podium.records import Answer
    from podium.remote.codec import to_plain
    from podium.server.served import Written

    draw = random.Random(key)
    ids = tuple(draw.randrange(4, vocabulary) for _ in range(tokens))
    logprobs = tuple(-draw.expovariate(2.0) for _ in range(tokens))
    return json.dumps(to_plain(Written(key, Answer(ids, logprobs, "stop", (0, 0)), None)))


def _groups(lines: list[str], policy: Any) -> list[Any]:
    """From the wire to groups with advantages: parsed, checked, decoded, scored. `lines` are in the requests' order."""
    from podium.advantage.build import assign_advantages
    from podium.advantage.grpo import grpo
    from podium.engine.vllm_server import VllmServer
    from podium.records import EngineTraits, Prompt
    from podium.reward.arithmetic import arithmetic
    from podium.rollout.single_turn import SingleTurn

    asked: list[Any] = []
    missing = set(range(len(lines)))

    async def generate(request: Any) -> Any:
        asked.append(request)
        line = json.loads(lines[len(asked) - 1])
        return VllmServer._answer(server, line, asked, missing)[1]  # type: ignore[arg-type]

    server = SimpleNamespace(
        _connection=SimpleNamespace(url="here"),
        _policy=policy,
        _check_owner=lambda run: None,
        traits=EngineTraits(channels=("disk",)),
        generate=generate,
    )
    stage = SingleTurn(
        server,  # type: ignore[arg-type]
        policy.tokenizer,
        policy.stop_ids,
        policy.vocabulary,
        ROLLOUTS,
        0,
        max_new_tokens=LONG,
    )
    prompts = [Prompt(ordinal, (1,) * 20, answer="7") for ordinal in range(len(lines) // ROLLOUTS)]

    async def all_of_them() -> list[Any]:
        made = []
        async for group in stage.start(prompts):
            rewards = tuple(arithmetic(group.prompt, rollout) for rollout in group.rollouts)
            parts = tuple({"arithmetic": reward} for reward in rewards)
            made.append(_scored(group, rewards, parts))
        return assign_advantages(made, function=grpo)

    return asyncio.run(all_of_them())


def _scored(group: Any, rewards: Any, parts: Any) -> Any:
    from dataclasses import replace

    return replace(group, rewards=rewards, reward_parts=parts, correct=(False,) * len(rewards))


def _packed(groups: list[Any]) -> Any:
    from podium.pack import pack

    return pack(groups, max_tokens_per_batch=65_536, temperature=1.0)


def _report(folder: Path, step: Any) -> None:
    from podium.records import RunState, StepReport
    from podium.run.folder import Ledger, RunFolder

    ordinals = tuple(group.prompt.ordinal for group in step.drawn)
    Ledger(RunFolder(folder)).write(StepReport(RunState(step=1), {}, step.drawn, ordinals))


def _route_s() -> float:
    """To find a worker with room among many that are busy, for each of them."""
    from podium.remote.pool import Limit, Member, Pool, Replica, Rules

    async def search() -> float:
        unused: Any = None
        rules = Rules((MEMBERS, MEMBERS), floor=1, max_restarts=0, start_s=1.0, recovery_s=1.0, frozen_s=1.0)
        pool: Pool[Member[Any]] = Pool(rules, unused, unused, unused)
        for number in range(MEMBERS):
            member = Member(str(number), unused, Limit(64), num_in_flight=number % 60)
            pool.replicas.append(Replica(str(number), unused, is_local=True, member=member))
        return _quickest(lambda: pool._with_room(4))

    return asyncio.run(search()) / MEMBERS


def _quickest(call: Callable[[], Any]) -> float:
    """CPU seconds, of several rounds."""
    seconds = []
    for _ in range(ROUNDS):
        before = time.process_time()
        call()
        seconds.append(time.process_time() - before)
    return min(seconds)
