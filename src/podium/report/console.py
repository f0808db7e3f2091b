"""The terminal: a progress bar and a live table while it trains, a summary at the end.

Where the output is no terminal it prints a line a step; `json` prints one JSON object a step, `quiet` the summary
only.
"""

import json
import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from rich.console import Console as RichConsole
from rich.console import Group as Stack
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from podium.records import EvalReport, StepReport

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


class Console:
    def __init__(
        self,
        *,
        mode: Annotated[
            Literal["auto", "live", "plain", "json", "quiet"],
            Field(description="auto: live on a terminal, else plain"),
        ] = "auto",
    ) -> None:
        self._console = RichConsole(highlight=False, soft_wrap=True)
        self._mode = mode if mode != "auto" else "live" if self._console.is_terminal else "plain"
        self._rows: deque[list[str]] = deque(maxlen=SHOWN_STEPS)
        self._live: Live | None = None
        self._held_out = ""
        self._rollout = ""

    def start(self, card: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
        self._steps = card["steps"]
        done = max((line["step"] for line in history), default=0)
        self._print({"event": "start", **card}, f"{card['title']}\n{card['folder']}")
        if self._mode == "live":
            self._progress = Progress(
                TextColumn("step"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
            )
            self._task = self._progress.add_task("train", total=self._steps, completed=done)
            self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._table)
            self._live.start()

    def write(self, report: StepReport) -> None:
        step, metrics = report.state.step, report.metrics
        values = [f"{metrics[name]:.3g}" if name in metrics else "–" for name in COLUMNS.values()]
        self._rows.append([str(step), *values])
        for first in [group for group in report.groups if group.rollouts][:1]:
            self._rollout = f"{first.prompt.question!r} → {first.rollouts[0].text!r} scores {first.rewards[0]}"
        if self._live is not None:
            self._progress.update(self._task, completed=step)
        cells = "  ".join(f"{head} {value}" for head, value in zip(COLUMNS, values, strict=True))
        self._print({"event": "step", "step": step, **metrics}, f"step {step}/{self._steps}  {cells}")

    def evaluated(self, report: EvalReport) -> None:
        shown = "  ".join(f"{name.removeprefix('eval/')} {value:.3g}" for name, value in report.metrics.items())
        self._held_out = f"held-out at step {report.step}: {shown}"
        self._print({"event": "eval", "step": report.step, **report.metrics}, self._held_out)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._stop_live()
        if self._mode == "json":
            print(json.dumps({"event": "finish", **summary}), flush=True)
        else:
            self._console.print(Text(summary_text(summary)))

    def fail(self) -> None:
        self._stop_live()

    def _stop_live(self) -> None:
        """The last table stays on the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, as_json: Mapping[str, Any], text: str) -> None:
        if self._mode in ("json", "plain"):
            try:
                print(json.dumps(as_json) if self._mode == "json" else text, flush=True)
            except BrokenPipeError:  # `podium train … | head`: nobody reads any more, the run goes on
                self._mode = "quiet"
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        elif self._mode == "live" and self._live is None:
            self._console.print(Text(text))

    def _table(self) -> Stack:
        table = Table(box=None, pad_edge=False)
        for head in ("step", *COLUMNS):
            table.add_column(head, justify="right")
        for row in self._rows:
            table.add_row(*row)
        return Stack(
            table, Text(self._held_out), Text(self._rollout, overflow="ellipsis", no_wrap=True), self._progress
        )


def summary_text(summary: Mapping[str, Any]) -> str:
    """What a person wants to know when a run ends."""
    lines = [f"{summary['state']}: step {summary['step']} of {summary['steps']} in {summary['seconds']:.1f} s"]
    if summary["message"]:
        lines.append(f"ended early: {summary['message']}")
    if summary["accuracy_after"] is not None:
        lines.append(
            f"held-out accuracy: {summary['accuracy_before']:.3f} before, {summary['accuracy_after']:.3f} after"
        )
    if summary["skipped_steps"]:
        lines.append(
            f"steps without an update: {summary['skipped_steps']} (no group had signal, or no finite gradient)"
        )
    if summary["dropped_groups"]:
        lines.append(f"prompts that the engine failed at and that were left out: {summary['dropped_groups']}")
    if summary["restarts"]:
        lines.append(f"taken up again: {summary['restarts']} times")
    lines.append(f"run folder: {summary['folder']}")
    if summary["page"]:
        lines.append(f"page: {summary['page']}")
    if summary["model"]:
        lines.append(f"trained model: {summary['model']}")
    else:
        lines.append(f"go on with: podium resume {summary['folder']}")
    return "\n".join(lines)


def to_terminal(text: str) -> None:
    """A warning, beside whatever is drawn."""
    print(text, file=sys.stderr, flush=True)
