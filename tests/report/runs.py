"""Run folders for tests, written by the run's own ledger."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podium.records import EvalReport, RunState, StepReport
from podium.run.folder import Ledger, RunFolder
from tests.builders import make_group, make_prompt, make_rollout

SETTINGS = """[run]
folder = "runs/{name}"
steps = {steps}
prompts_per_step = 2
rollouts_per_prompt = 5
seed = {seed}
[model]
name = "embedded"
[model.lora]
r = 16
[loss]
name = "grpo"
[trainer]
lr = 0.0001
"""


def step_numbers(step: int) -> dict[str, float]:
    """About as many metrics as a run has."""
    names = ["reward/mean", "reward/correct_rate", "reward/arithmetic_mean", "batch/kept_ratio", "loss/total"]
    names += ["policy/entropy", "rollout/length_mean", "rollout/length_max", "rollout/stop_rate", "mismatch/abs_mean"]
    names += ["optim/grad_norm", "optim/lr", "version/policy", "version/lag_max", "rollout/tokens_per_s"]
    names += ["perf/train_tokens_per_s", *(f"other/number_{number}" for number in range(40))]
    seconds = {"rollout": 0.5, "pack": 0.01, "train": 0.25, "sync": 0.02, "report": 0.01, "reward": 0.1}
    wave = {name: 0.5 + 0.4 * math.sin(step / 50 + place) for place, name in enumerate(names)}
    return wave | {f"time/{stage}_s": value for stage, value in seconds.items()}


def make_run(
    path: Path, *, steps: int = 3, texts: Sequence[str] = ("#### 3", "#### 4"), state: str = "finished", seed: int = 0
) -> RunFolder:
    """`texts` are the rollouts of every step, with rewards that fall from one to the next."""
    folder = RunFolder(path)
    path.mkdir(parents=True)
    folder.settings.write_text(SETTINGS.format(name=path.name, steps=steps, seed=seed))
    folder.event("started", step=0)
    ledger = Ledger(folder, lambda token_id: f"<{token_id}>")
    ledger.evaluated(EvalReport(0, 0, {"eval/accuracy": 0.25}, 1.0))
    for step in range(1, steps + 1):
        add_step(ledger, step, texts)
    ledger.evaluated(EvalReport(steps, steps, {"eval/accuracy": 0.75}, 1.0))
    folder.write_status(state, steps, steps)
    return folder


def add_step(ledger: Ledger, step: int, texts: Sequence[str]) -> None:
    rollouts = tuple(
        make_rollout(
            text,
            (8, 24 if index == 0 else 25, 2),
            sample_index=index,
            finish_reason="stop" if index % 2 == 0 else "length",
        )
        for index, text in enumerate(texts)
    )
    rewards = tuple(1.2 if index == 0 else round(1.0 - index / len(texts), 3) for index in range(len(texts)))
    parts: tuple[dict[str, Any], ...] = tuple({"arithmetic": reward, "format": 0.1} for reward in rewards)
    advantages = tuple(1.0 - index for index in range(len(texts)))
    group = make_group(rewards, prompt=make_prompt(step), rollouts=rollouts, reward_parts=parts, advantages=advantages)
    seen = {(step, rollouts[0].digest): (-0.5, -0.25, -1.5)}
    ledger.write(StepReport(RunState(step=step), step_numbers(step), (group,), (step,), seen))
