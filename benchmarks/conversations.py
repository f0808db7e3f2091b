"""How much of the tools' time conversations hide: 200 episodes with a tool that sleeps, on the CPU.

    python benchmarks/conversations.py [--episodes 200] [--out results.json]

The embedded model with a calculator plays one turn with a call and one with the answer. The calculator takes no time,
0.2 s, or 0 to 2 s (most calls short). Printed is the wall time of the episodes, the longest single episode, and
their ratio: time / max(time without latency, longest episode). With 1 all waiting is hidden behind other episodes.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import torch

from podium.data.products import products
from podium.engine.build import hand_over, make_engine
from podium.model.chat import render
from podium.model.load import load_policy
from podium.records import Group, Prompt
from podium.rollout.build import make_rollout_for
from podium.settings.tables import Settings

TOOLS = """
import hashlib, time
from podium.tool.calculator import calculator as exact

def calculator(expression: str, *, seconds: float = 0.0, tail: bool = False) -> str:
    \"\"\"Computes an expression.\"\"\"
    draw = int(hashlib.md5(expression.encode()).hexdigest()[:8], 16) / 2**32
    time.sleep(2.0 * draw**3 if tail else seconds)
    return exact(expression)
"""


async def played(settings: Settings, policy: Any, prompts: list[Prompt]) -> tuple[float, list[Group]]:
    engine = make_engine(settings, policy, snapshot=False)
    rollout = make_rollout_for(settings, engine, policy, "train")
    try:
        await hand_over(settings, engine, policy, "benchmark")
        warm = [group async for group in rollout.start(prompts[:2])]  # starts the processes
        assert warm
        started = time.monotonic()
        groups = [group async for group in rollout.start(prompts[2:])]
        return time.monotonic() - started, groups
    finally:
        rollout.close()
        engine.close()


def measured(tool: Path, episodes: int, policy: Any, rows: Any, **latency: Any) -> dict[str, Any]:
    settings = Settings.from_dict(
        {
            "run": {"rollouts_per_prompt": 8},
            "model": {"name": "embedded-tools", "device": "cpu"},
            "data": [{"name": "products"}],
            "tool": [{"name": f"{tool}:calculator", **latency}],
            "reward": [{"name": "arithmetic"}],
            "rollout": {
                "name": "conversation",
                "max_turns": 2,
                "max_new_tokens": 64,
                "max_read_tokens": 96,
                "max_processes": episodes,
            },
        }
    )
    count = episodes // 8 + 2
    prompts = [
        Prompt(ordinal, render(policy.tokenizer, row.messages), row.messages, row.answer)
        for ordinal, row in enumerate(rows[:count])
    ]
    seconds, groups = asyncio.run(played(settings, policy, prompts))
    every = [rollout for group in groups for rollout in group.rollouts]
    longest = max(sum(turn.seconds for turn in rollout.turns if turn.role != "assistant") for rollout in every)
    calls = sum(rollout.counts.get("tool_calls", 0) for rollout in every)
    in_tools = sum(rollout.counts.get("tool_s", 0.0) for rollout in every)
    counted = {"episodes": len(every), "calls": calls, "tool_s": in_tools}
    return {"seconds": seconds, "longest_in_tools_s": longest, **counted}


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--episodes", type=int, default=200)
    arguments.add_argument("--out", type=Path)
    given = arguments.parse_args()
    tool = Path("/tmp") / "podium_benchmark_tools.py"
    tool.write_text(TOOLS)
    settings = Settings.from_dict({"model": {"name": "embedded-tools", "device": "cpu"}})
    policy, rows = load_policy(settings.model, seed=0), products()
    found = {}
    for name, latency in (("0 s", {}), ("0.2 s", {"seconds": 0.2}), ("0 to 2 s", {"tail": True})):
        found[name] = measured(tool, given.episodes, policy, rows, **latency)
        floor = max(found["0 s"]["seconds"], found[name]["longest_in_tools_s"])
        found[name]["ratio"] = found[name]["seconds"] / floor
        print(f"tool of {name}: " + "  ".join(f"{key} {value:.2f}" for key, value in found[name].items()), flush=True)
    if given.out:
        given.out.write_text(json.dumps({"torch": torch.__version__, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
