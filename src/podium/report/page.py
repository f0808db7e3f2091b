"""report.html in the run folder: one self-contained file that always shows the run as it stands.

No network, no account, no server: open it from disk; while the run goes on it reloads itself. The template beside
this file draws everything from one JSON object, so no text of a rollout is ever part of the markup.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from podium.records import EvalReport, Group, StepReport
from podium.run_folder import RunFolder, write_atomically

TEMPLATE = Path(__file__).with_name("page.html")
PLACE = "/*DATA*/"
MAX_POINTS = 1000
"""Steps that a page carries; of a longer run every n-th."""


class Page:
    def __init__(
        self,
        folder: RunFolder,
        *,
        every_s: Annotated[float, Field(ge=0, description="seconds between two writes at least")] = 2.0,
    ) -> None:
        self._folder, self._every_s = folder, every_s
        self._card: dict[str, Any] = {}
        self._lines: list[Mapping[str, Any]] = []
        self._rollouts: list[dict[str, Any]] = []
        self._written = 0.0

    def start(self, card: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
        self._card = dict(card)
        self._lines = list(history)
        self._write("running")

    def write(self, report: StepReport) -> None:
        self._lines.append({"step": report.state.step, **report.metrics})
        self._rollouts = chosen_rollouts(report.groups)
        if time.monotonic() - self._written >= self._every_s:
            self._write("running")

    def evaluated(self, report: EvalReport) -> None:
        self._lines.append({"step": report.step, "eval": True, **report.metrics})

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._write(summary["state"])

    def fail(self) -> None:
        if self._card:
            self._write("failed")

    def _write(self, state: str) -> None:
        steps = [line for line in self._lines if not line.get("eval")]
        stride = -(-len(steps) // MAX_POINTS) or 1
        data = {
            "state": state,
            "card": self._card,
            "steps": steps[::stride] if stride == 1 else [*steps[:-1:stride], *steps[-1:]],
            "evals": [line for line in self._lines if line.get("eval")],
            "rollouts": self._rollouts,
        }
        text = json.dumps(data, default=str).replace("<", "\\u003c")  # no text can close the script element
        write_atomically(self._folder.page, TEMPLATE.read_text(encoding="utf-8").replace(PLACE, text))
        self._written = time.monotonic()


def chosen_rollouts(groups: Sequence[Group], each: int = 3) -> list[dict[str, Any]]:
    """The best, the worst and a few from the middle of a step."""
    rollouts = [
        {
            "prompt": group.prompt.question,
            "answer": str(group.prompt.answer),
            "text": rollout.text,
            "reward": reward,
            "parts": dict(parts),
            "finish_reason": rollout.finish_reason,
            "length": len(rollout.token_ids),
        }
        for group in groups
        for rollout, reward, parts in zip(group.rollouts, group.rewards, group.reward_parts, strict=True)
        if reward is not None
    ]
    different = {(rollout["prompt"], rollout["text"], rollout["reward"]): rollout for rollout in rollouts}
    ranked = sorted(different.values(), key=lambda rollout: -rollout["reward"])
    middle = max(0, len(ranked) // 2 - each // 2)
    parts = {"best": ranked[:each], "middle": ranked[middle : middle + each], "worst": ranked[-each:]}
    return [{"kind": kind, **rollout} for kind, some in parts.items() for rollout in some]
