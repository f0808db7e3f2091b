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
    from podium.records import StepGroups
    from podium.runtime import _wire as wire
    from podium.sections import Model

    (folder / "rollouts").mkdir(parents=True)
    policy = load_policy(Model(name="embedded", device="cpu"), seed=0)
    by_length: dict[int, dict[str, float]] = {}
    for tokens in (SHORT, LONG):
        lines = [_line(key, tokens, policy.vocabulary) for key in range(GROUPS)]
        groups = _groups(lines, policy)
        step = StepGroups(GROUPS).plus(groups, groups)
        batches = _packed(groups)
        by_length[tokens] = {
            "receive": _quickest(lambda lines=lines: _groups(lines, policy)),
            "pack": _quickest(lambda groups=groups: _packed(groups)),
            "order": _quickest(lambda batches=batches: wire.batches_to_bytes(batches)),
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
    """An answer as a worker sends it."""
    from podium.records import Answer
    from podium.server.wire import line_of

    draw = random.Random(key)
    ids = tuple(tuple(draw.randrange(4, vocabulary) for _ in range(tokens)) for _ in range(ROLLOUTS))
    logprobs = tuple(tuple(-draw.expovariate(2.0) for _ in range(tokens)) for _ in range(ROLLOUTS))
    return json.dumps(line_of(Answer(key, ids, logprobs, ("stop",) * ROLLOUTS, ((0, 0),) * ROLLOUTS), None))


def _groups(lines: list[str], policy: Any) -> list[Any]:
    """From the wire to groups with advantages: parsed, checked, decoded, scored."""
    from podium.advantage._assign import assign_advantages
    from podium.advantage.grpo import grpo
    from podium.engine.vllm_server import VllmServer
    from podium.records import Prompt, Request
    from podium.reward.arithmetic import arithmetic
    from podium.rollout.single_turn import SingleTurn

    asked = {key: Request(key, (1,) * 20, tuple(range(ROLLOUTS))) for key in range(len(lines))}
    connection = SimpleNamespace(url="here")
    server = SimpleNamespace(_connection=connection, _policy=policy, _check_owner=lambda run: None)
    stage = SingleTurn(
        server,  # type: ignore[arg-type]
        policy.tokenizer,
        policy.stop_ids,
        policy.vocabulary,
        ROLLOUTS,
        0,
        max_new_tokens=LONG,
    )

    async def all_of_them() -> list[Any]:
        made = []
        for line in lines:
            answer = VllmServer._answer(server, json.loads(line), asked)  # type: ignore[arg-type]
            group, _ = await stage._group(Prompt(answer.key, (1,) * 20, answer="7"), answer)
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
    from podium.ledger import Ledger
    from podium.records import RunState, StepReport
    from podium.report.jsonl import Jsonl
    from podium.run_folder import RunFolder

    ordinals = tuple(group.prompt.ordinal for group in step.drawn)
    Jsonl(Ledger(RunFolder(folder))).write(StepReport(RunState(step=1), {}, step.drawn, ordinals))


def _route_s() -> float:
    """To find a worker with room among many that are busy, for each of them."""
    from podium.engine._pool.members import Limit, Member, Members

    async def search() -> float:
        members = Members()
        for number in range(MEMBERS):
            members.add(Member(str(number), None, Limit(64), rollouts=number % 60))  # type: ignore[arg-type]
        return _quickest(lambda: members._with_room(4))

    return asyncio.run(search()) / MEMBERS


def _quickest(call: Callable[[], Any]) -> float:
    """CPU seconds, of several rounds."""
    seconds = []
    for _ in range(ROUNDS):
        before = time.process_time()
        call()
        seconds.append(time.process_time() - before)
    return min(seconds)
