"""A run folder read for people: everything that a page shows comes from here, while the run goes on or long after.

Only what is new is read each time. A resume cuts files back; then they are read from the start again.
"""

import json
import time
import tomllib
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from podium.files import open_regular, read_regular
from podium.report._card import run_card
from podium.report._glossary import explanations
from podium.report._health import Facts, Verdict, health
from podium.report._pieces import read_pieces
from podium.report._rollouts import chosen, for_page, is_whole, shown_steps
from podium.report._series import Series, is_number
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
STATUS = {"state": str, "message": str, "step": int, "steps": int, "percent": (int, float), "pid": int}
EVENT = {"event": str, "error": str, "message": str, "time": (int, float)}
"""Types of what the page and its verdicts rely on; a line may leave any of them out."""
MAX_STEP = 1 << 62


class GrowingFile:
    """A file of JSON lines to which others append."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._tail = path, 0, b""
        self.passed_over = 0
        """Lines of the last call that were no JSON objects."""

    def new_lines(self) -> tuple[list[dict[str, Any]], bool]:
        """(lines that were added since the last call, whether the file was cut or replaced and these are all)."""
        self.passed_over = 0
        try:
            with open_regular(self._path) as file:
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
        raws = whole.splitlines()
        lines = [line for raw in raws if (line := _parsed(raw)) is not None]
        self.passed_over = len(raws) - len(lines)
        return lines, is_new


class RunReader:
    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._metrics, self._events_file = GrowingFile(folder.metrics), GrowingFile(folder.events)
        self.series, self.evals = Series(), list[dict[str, Any]]()
        self._events: list[dict[str, Any]] = []
        self._moments: deque[dict[str, Any]] = deque(maxlen=MAX_MOMENTS)
        self._rollouts: dict[int, list[dict[str, Any]]] = {}
        self._unreadable: Counter[str] = Counter()
        self._pieces: dict[int, str] = {}
        self._pieces_size = 0

    def refresh(self) -> None:
        """Takes in what the run has written since the last time."""
        lines, is_new = self._metrics.new_lines()
        if is_new:
            self.series, self.evals, self._rollouts = Series(), [], {}
            self._unreadable.clear()
        self._unreadable[self.folder.metrics.name] += self._metrics.passed_over
        for line in lines:
            if type(line.get("step")) is not int or not 0 <= line["step"] < MAX_STEP:
                self._unreadable[self.folder.metrics.name] += 1
            elif line.get("eval"):
                self.evals.append(line)
            else:
                self.series.add(line)
        events, is_new = self._events_file.new_lines()
        if is_new:
            self._events.clear()
            self._moments.clear()
        self._unreadable[self.folder.events.name] += self._events_file.passed_over
        for event in events:
            if not _fits(event, EVENT) or "event" not in event:
                self._unreadable[self.folder.events.name] += 1
            elif (kind := event["event"]) not in LEFT_OUT:
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
            "health": [verdict._asdict() for verdict in (*self._complaints(), *health(facts))],
            "events": self._events[-MAX_EVENTS:],
            "moments": [_without_lists(event) for event in self._moments],
            "words": explanations(sorted(names)),
        }

    def status(self) -> dict[str, Any]:
        """status.json; a run that says that it goes on, and that no process holds, was killed."""
        status = {key: value for key, value in self.folder.status.items() if _fits({key: value}, STATUS)}
        if status.get("state") == "running" and not self.folder.is_locked():
            return {**status, "state": "killed"}
        return status or {"state": "running", "step": 0}

    def card(self, status: dict[str, Any]) -> dict[str, Any]:
        tables = self.settings()
        run = tables.get("run")
        steps = status.get("steps") or (run.get("steps") if isinstance(run, dict) else None)
        return run_card(tables, self.folder.path, steps if isinstance(steps, int) else 0)

    def settings(self) -> dict[str, Any]:
        """The run's tables; empty where they cannot be read."""
        try:
            return tomllib.loads(read_regular(self.folder.settings).decode())
        except (OSError, ValueError, RecursionError):
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
            lines = [_parsed(raw) or {} for raw in read_regular(path).splitlines()]
        except OSError:
            return []
        whole = [line for line in lines if is_whole(line)]
        self._unreadable[f"rollouts/{path.name}"] = len(lines) - len(whole)
        return whole

    def _complaints(self) -> list[Verdict]:
        """A page that left lines out says so."""
        told = ", ".join(f"{count} of {name}" for name, count in sorted(self._unreadable.items()) if count)
        advice = "A kill in mid-write leaves one; more come from a full disk, an edit by hand or another program."
        text = f"Lines that are not what a run writes, and that this page leaves out: {told}."
        return [Verdict("note", "run", "Some lines could not be read", text, advice)] if told else []

    def _pieces_of(self, rollouts: Iterable[dict[str, Any]]) -> dict[int, str]:
        path = self.folder.tokens
        if path.is_file() and path.stat().st_size != self._pieces_size:
            self._pieces, self._pieces_size = read_pieces(path), path.stat().st_size
        used = {token_id for rollout in rollouts for token_id in rollout["ids"]}
        return {token_id: self._pieces[token_id] for token_id in sorted(used) if token_id in self._pieces}


def _without_lists(event: dict[str, Any]) -> dict[str, Any]:
    """Of a list its length: a timeline counts prompts, it does not name them."""
    return {key: len(value) if isinstance(value, list) else value for key, value in event.items()}


def _fits(line: dict[str, Any], kinds: dict[str, Any]) -> bool:
    """A number that no clock or counter shows is of the wrong kind too."""
    known = {key: value for key, value in line.items() if key in kinds}
    return all(
        isinstance(value, kinds[key]) and (isinstance(value, str) or is_number(value)) for key, value in known.items()
    )


def _parsed(raw: bytes) -> dict[str, Any] | None:
    """Skips a line that a kill cut off. NaN and infinities, which JSON does not have, become null."""
    for parse in (orjson.loads, lambda raw: json.loads(raw, parse_constant=lambda _: None)):  # fast; all of Python's
        try:
            line = parse(raw)
        except (ValueError, RecursionError):
            continue
        return line if isinstance(line, dict) else None
    return None
