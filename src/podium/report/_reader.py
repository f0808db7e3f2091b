"""A run folder read for people: everything that a page shows comes from here, while the run goes on or long after.

Only what is new is read each time. A resume cuts files back; then they are read from the start again.
"""

import json
import time
import tomllib
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from podium.report._card import run_card
from podium.report._glossary import explanations
from podium.report._health import Facts, health
from podium.report._pieces import read_pieces
from podium.report._rollouts import chosen, for_page, shown_steps
from podium.report._series import Series
from podium.report._timeline import LAPS
from podium.run_folder import RunFolder

MAX_POINTS = 600
"""Points of a curve; of a longer run each stands for several steps."""
RECENT_STEPS = 100
"""Steps that a long run's page has in full."""
MAX_EVALS = 500
MAX_EVENTS = 60
ROUTINE = ("sampling", "group", "training", "trained", "pushed", "committing", "committed")
"""Events of every step; only the last of them are kept, for the timeline."""
MAX_MOMENTS = 300
LEFT_OUT = ("task", "task_done")
"""Events of every call of a runtime, which would crowd out the others."""


class GrowingFile:
    """A file of JSON lines to which others append."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._tail = path, 0, b""

    def new_lines(self) -> tuple[list[dict[str, Any]], bool]:
        """(lines that were added since the last call, whether the file was cut or replaced and these are all)."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset - len(self._tail))
                is_new = file.read(len(self._tail)) != self._tail
                if is_new:
                    self._offset = file.seek(0)
                data = file.read()
        except OSError:
            return [], False
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._tail = whole[-200:] or (b"" if is_new else self._tail)
        return [line for raw in whole.splitlines() if (line := _parsed(raw)) is not None], is_new


class RunReader:
    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._metrics, self._events_file = GrowingFile(folder.metrics), GrowingFile(folder.events)
        self.series, self.evals = Series(), list[dict[str, Any]]()
        self._events: list[dict[str, Any]] = []
        self._moments: deque[dict[str, Any]] = deque(maxlen=MAX_MOMENTS)
        self._rollouts: dict[int, list[dict[str, Any]]] = {}
        self._pieces: dict[int, str] = {}
        self._pieces_size = 0

    def refresh(self) -> None:
        """Takes in what the run has written since the last time."""
        lines, is_new = self._metrics.new_lines()
        if is_new:
            self.series, self.evals, self._rollouts = Series(), [], {}
        for line in lines:
            if line.get("eval"):
                self.evals.append(line)
            else:
                self.series.add(line)
        events, is_new = self._events_file.new_lines()
        if is_new:
            self._events.clear()
            self._moments.clear()
        for event in events:
            if (kind := event.get("event")) not in LEFT_OUT:
                (self._moments if kind in ROUTINE else self._events).append(event)

    def data(self) -> dict[str, Any]:
        """All that one page draws, after `refresh`."""
        status = self.status()
        last = self.series.steps[-1] if len(self.series) else 0
        rollouts = self._shown_rollouts(last)
        facts = Facts(self.series, self.evals, self._events, status)
        evals = self.evals[:: -(-len(self.evals) // MAX_EVALS) or 1]
        if self.evals and evals[-1] is not self.evals[-1]:
            evals = [*evals, self.evals[-1]]
        names = {*self.series.names, *(name for line in evals for name in line if "/" in name)}
        series = self.series.sampled(MAX_POINTS)
        return {
            "written": time.time(),
            "status": status,
            "card": self.card(status),
            "laps": LAPS,
            "series": series,
            "recent": self.series.lines(RECENT_STEPS) if series["stride"] > 1 else [],
            "evals": evals,
            "rollouts": rollouts,
            "rollout_steps": last,
            "pieces": self._pieces_of(rollouts),
            "health": [verdict._asdict() for verdict in health(facts)],
            "events": self._events[-MAX_EVENTS:],
            "moments": [_without_lists(event) for event in self._moments],
            "words": explanations(sorted(names)),
        }

    def status(self) -> dict[str, Any]:
        """status.json; a run that says that it goes on, and that no process holds, was killed."""
        status = self.folder.status
        if status.get("state") == "running" and not self.folder.is_locked():
            return {**status, "state": "killed"}
        return status or {"state": "running", "step": 0}

    def card(self, status: dict[str, Any]) -> dict[str, Any]:
        tables = self.settings()
        steps = status.get("steps") or tables.get("run", {}).get("steps", 0)
        return run_card(tables, self.folder.path, steps)

    def settings(self) -> dict[str, Any]:
        """The run's tables; empty where they cannot be read."""
        try:
            return tomllib.loads(self.folder.settings.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def step_rollouts(self, step: int) -> dict[str, Any]:
        """Every rollout of one step, whole."""
        rollouts = [for_page(line, step, is_cut=False) for line in self._lines_of(step)]
        return {"rollouts": rollouts, "pieces": self._pieces_of(rollouts)}

    def _shown_rollouts(self, last: int) -> list[dict[str, Any]]:
        steps = shown_steps(last)
        self._rollouts = {step: some for step, some in self._rollouts.items() if step in steps}
        for step in steps:
            if step not in self._rollouts:
                self._rollouts[step] = chosen(self._lines_of(step), step)
        return [rollout for step in steps for rollout in self._rollouts[step]]

    def _lines_of(self, step: int) -> list[dict[str, Any]]:
        path = self.folder.rollouts / f"step-{step:06d}.jsonl"
        try:
            return [line for raw in path.read_bytes().splitlines() if (line := _parsed(raw)) is not None]
        except OSError:
            return []

    def _pieces_of(self, rollouts: Iterable[dict[str, Any]]) -> dict[int, str]:
        path = self.folder.tokens
        if path.exists() and path.stat().st_size != self._pieces_size:
            self._pieces, self._pieces_size = read_pieces(path), path.stat().st_size
        used = {token_id for rollout in rollouts for token_id in rollout["ids"]}
        return {token_id: self._pieces[token_id] for token_id in sorted(used) if token_id in self._pieces}


def _without_lists(event: dict[str, Any]) -> dict[str, Any]:
    """Of a list its length: a timeline counts prompts, it does not name them."""
    return {key: len(value) if isinstance(value, list) else value for key, value in event.items()}


def _parsed(raw: bytes) -> dict[str, Any] | None:
    """A line that was cut off by a kill is passed over."""
    for parse in (orjson.loads, json.loads):  # the first is fast, the second takes all that Python writes
        try:
            line = parse(raw)
        except ValueError:
            continue
        return line if isinstance(line, dict) else None
    return None
