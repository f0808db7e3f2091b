"""The terminal: a progress bar, a live table and sample rollouts during training, and a summary at the end.

If the output is not a terminal, it prints one line per step; `json` prints one JSON object per step, `quiet` only the
summary.
"""

import json
import os
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console as RichConsole
from rich.console import Group as Stack
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from podium.records import EvalReport, Group, StepReport
from podium.report.web.reader import LAPS
from podium.untrusted import printable, say

COLUMNS = {
    "reward": "reward/mean",
    "correct": "reward/correct_rate",
    "kept": "batch/kept_ratio",
    "loss": "loss/total",
    "entropy": "policy/entropy",
    "length": "rollout/length_mean",
    "mismatch": "mismatch/abs_mean",
    "grad": "optim/grad_norm",
}
"""Heading → metric."""

SHOWN_STEPS = 12
ROLLOUT_EVERY_S = 5.0
"""Minimum time that a rollout stays on screen, so that people can read it."""


class Console:
    """`mode` is `podium train`'s `--json` or `--quiet`; auto: live on a terminal, else plain."""

    def __init__(self, mode: Literal["auto", "live", "plain", "json", "quiet"] = "auto") -> None:
        self._console = RichConsole(highlight=False, soft_wrap=True)
        self._mode = mode if mode != "auto" else "live" if self._console.is_terminal else "plain"
        self._rows: deque[list[str]] = deque(maxlen=SHOWN_STEPS)
        self._live: Live | None = None
        self._held_out = ""
        self._rollout = ""
        self._rollout_until = 0.0
        self._seconds: Counter[str] = Counter()
        self._num_steps = 0

    def start(self, card: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
        self._steps = card["steps"]
        done = max((line["step"] for line in history), default=0)
        self._print({"event": "start", **card}, f"{card['title']}\n{card['folder']}")
        if self._mode == "live":
            self._recent: deque[float] = deque([time.monotonic()], maxlen=SHOWN_STEPS + 1)
            columns = (TextColumn("step"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, TextColumn("{task.fields[left]}"))
            self._task = self._progress.add_task("train", total=self._steps, completed=done, left="")
            self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._table)
            self._live.start()

    def write(self, report: StepReport) -> None:
        step, metrics = report.state.step, report.metrics
        values = [f"{metrics[name]:.3g}" if name in metrics else "–" for name in COLUMNS.values()]
        self._rows.append([str(step), *values])
        self._seconds.update({stage: metrics.get(f"time/{stage}_s", 0.0) for stage in LAPS})
        self._num_steps += 1
        if self._live is not None:
            self._recent.append(time.monotonic())
            self._progress.update(self._task, completed=step, left=self._time_left(step))
            self._show_rollout(step, report.groups)
        cells = "  ".join(f"{head} {value}" for head, value in zip(COLUMNS, values, strict=True))
        self._print({"event": "step", "step": step, **metrics}, f"step {step}/{self._steps}  {cells}")

    def evaluated(self, report: EvalReport) -> None:
        shown = "  ".join(
            f"{name.removeprefix('eval/')} {value:.3g}"
            for name, value in report.metrics.items()
            if not name.endswith(("_low", "_high"))
        )
        self._held_out = f"held-out at step {report.step}: {shown}"
        self._print({"event": "eval", "step": report.step, **report.metrics}, self._held_out)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._stop_live()
        if self._mode == "json":
            say(json.dumps({"event": "finish", **summary}))
        else:
            self._console.print(Text(printable(summary_text(summary, self._seconds, self._num_steps))))

    def fail(self) -> None:
        self._stop_live()

    def _stop_live(self) -> None:
        """Leaves the last table on the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _time_left(self, step: int) -> str:
        """Estimated from the last steps only: the first steps of a run are slow, and some steps include evaluations."""
        per_step = (self._recent[-1] - self._recent[0]) / (len(self._recent) - 1)
        return f"{duration(per_step * (self._steps - step))} left" if step < self._steps else ""

    def _show_rollout(self, step: int, groups: Sequence[Group]) -> None:
        """Shows the best and the worst rollout of a step in turn; its first rollout if none has a reward."""
        if time.monotonic() < self._rollout_until:
            return
        scored = [(reward, g, i) for g, group in enumerate(groups) for i, reward in enumerate(group.rewards)
                  if reward is not None]  # fmt: skip
        pick = max if len(self._rows) % 2 else min
        reward, g, i = pick(scored) if scored else (None, 0, 0)
        self._rollout = f"step {step}: {groups[g].prompt.question!r} → {groups[g].rollouts[i].text!r} scores " + (
            "nothing" if reward is None else f"{reward:.3g}"
        )
        self._rollout_until = time.monotonic() + ROLLOUT_EVERY_S

    def _print(self, as_json: Mapping[str, Any], text: str) -> None:
        if self._mode in ("json", "plain"):
            try:
                say(json.dumps(as_json) if self._mode == "json" else text)
            except BrokenPipeError:  # `podium train … | head`: the reader has exited, the run continues
                self._mode = "quiet"
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        elif self._mode == "live" and self._live is None:
            self._console.print(Text(printable(text)))

    def _table(self) -> Stack:
        table = Table(box=None, pad_edge=False)
        for head in ("step", *COLUMNS):
            table.add_column(head, justify="right")
        for row in self._rows:
            table.add_row(*row)
        return Stack(
            table,
            Text(printable(self._held_out)),
            Text(printable(self._rollout), overflow="ellipsis", no_wrap=True),
            self._progress,
        )


def duration(seconds: float) -> str:
    """85 s, 12 min, 3 h 20 min"""
    minutes = round(seconds / 60)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def summary_text(summary: Mapping[str, Any], seconds: Mapping[str, float] | None = None, num_steps: int = 0) -> str:
    """What a person wants to know when a run ends; `seconds` are the totals per stage over `num_steps` steps."""
    lines = [f"{summary['state']}: step {summary['step']} of {summary['steps']} in {summary['seconds']:.1f} s"]
    if summary["message"]:
        lines.append(f"ended early: {summary['message']}")
    if summary["accuracy_after"] is not None:
        lines.append(
            f"held-out accuracy: {summary['accuracy_before']:.3f} before, {summary['accuracy_after']:.3f} after"
        )
    if summary.get("untrained"):
        lines.append(
            f"NOTHING WAS TRAINED: none of the {summary['step']} steps changed the policy; {summary['untrained']}"
        )
    elif summary["skipped_steps"]:
        lines.append(
            f"steps without an update: {summary['skipped_steps']} (no group had signal, or no finite gradient)"
        )
    if summary["dropped_groups"]:
        lines.append(f"prompts dropped because the engine failed on them: {summary['dropped_groups']}")
    if summary["restarts"]:
        times = "once" if summary["restarts"] == 1 else f"{summary['restarts']} times"
        lines.append(f"resumed: {times}")
    if total := sum((seconds or {}).values()):
        shares = sorted((seconds or {}).items(), key=lambda pair: -pair[1])[:3]
        parts = ", ".join(f"{stage} {value / total:.0%}" for stage, value in shares if value > 0.005 * total)
        lines.append(f"a step took {total / num_steps:.3g} s: {parts}")
    lines.append(f"run folder: {summary['folder']}")
    if summary["page"]:
        lines.append(f"page: {summary['page']} (live: podium report {summary['folder']})")
    if summary["model"]:
        what = "model (unchanged)" if summary.get("untrained") else "trained model"
        lines.append(f"{what}: {summary['model']}")
        is_adapter = (Path(summary["model"]) / "adapter_config.json").is_file()
        merged = " (--merge for plain weights)" if is_adapter else ""
        lines.append(f"export it with: podium export {summary['folder']} OUT{merged}")
    else:
        lines.append(f"continue with: podium resume {summary['folder']}")
    return "\n".join(lines)
