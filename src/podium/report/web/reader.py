"""From a run folder to everything that a page shows, during the run or long after it.

Each refresh reads only what is new. A resume truncates files; the reader then starts again from their beginning.
"""

import json
import time
import tomllib
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from podium.remote.files import open_regular, read_regular
from podium.report.jsonl import read_pieces
from podium.report.web.glossary import explanations
from podium.report.web.health import Facts, Verdict, health
from podium.report.web.rollouts import chosen, for_page, is_whole, shown_steps
from podium.report.web.series import LAPS, Series, is_number
from podium.run.folder import RunFolder

MAX_POINTS = 600
"""Points per curve; in a longer run each point stands for several steps."""
RECENT_STEPS = 100
"""Last steps that the page of a long run carries in full."""
MAX_EVALS = 500
MAX_EVENTS = 60
ROUTINE = ("sampling", "group", "training", "trained", "pushed", "committing", "committed")
"""Events that every step writes; only the last `MAX_MOMENTS` of them are kept, for the timeline."""
MAX_MOMENTS = 300
LEFT_OUT = ("task", "task_done")
"""Events that a runtime writes per call; they would crowd out the others."""
STATUS = {"state": str, "message": str, "step": int, "steps": int, "percent": (int, float), "pid": int}
EVENT = {"event": str, "error": str, "message": str, "time": (int, float)}
"""Types of the fields that the page relies on; every field is optional."""
MAX_STEP = 1 << 62


class GrowingFile:
    """A file of JSON lines to which another process appends."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._tail = path, 0, b""
        self.passed_over = 0
        """Lines of the last call that were not JSON objects."""

    def new_lines(self) -> tuple[list[dict[str, Any]], bool]:
        """(lines added since the last call, whether the file was truncated or replaced and these are all its lines)."""
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
        """Reads what the run has written since the last call."""
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
        """All data of one page; call `refresh` first."""
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
        """status.json. The state is "killed" if the file says "running" but no process holds the run's lock."""
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
        """The tables of settings.toml; empty if the file cannot be read."""
        try:
            return tomllib.loads(read_regular(self.folder.settings).decode())
        except (OSError, ValueError, RecursionError):
            return {}

    def step_rollouts(self, step: int) -> dict[str, Any]:
        """Every rollout of one step, untruncated."""
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
        """A note if the page leaves lines out."""
        counts = ", ".join(f"{count} of {name}" for name, count in sorted(self._unreadable.items()) if count)
        advice = "A kill during a write leaves one such line; more come from a full disk, a manual edit or a program."
        text = f"This page leaves out lines that it cannot read: {counts}."
        return [Verdict("note", "run", "Some lines could not be read", text, advice)] if counts else []

    def _pieces_of(self, rollouts: Iterable[dict[str, Any]]) -> dict[int, str]:
        path = self.folder.tokens
        if path.is_file() and path.stat().st_size != self._pieces_size:
            self._pieces, self._pieces_size = read_pieces(path), path.stat().st_size
        used = {token_id for rollout in rollouts for token_id in rollout["ids"]}
        return {token_id: self._pieces[token_id] for token_id in sorted(used) if token_id in self._pieces}


def _without_lists(event: dict[str, Any]) -> dict[str, Any]:
    """Replaces each list by its length: the timeline counts prompts and does not name them."""
    return {key: len(value) if isinstance(value, list) else value for key, value in event.items()}


def _fits(line: dict[str, Any], kinds: dict[str, Any]) -> bool:
    """Whether every known field has its type; a number must be finite too."""
    known = {key: value for key, value in line.items() if key in kinds}
    return all(
        isinstance(value, kinds[key]) and (isinstance(value, str) or is_number(value)) for key, value in known.items()
    )


def _parsed(raw: bytes) -> dict[str, Any] | None:
    """None for a line that a kill truncated. NaN and infinities, which JSON does not have, become null."""
    # orjson is fast; Python's parser accepts more.
    for parse in (orjson.loads, lambda raw: json.loads(raw, parse_constant=lambda _: None)):
        try:
            line = parse(raw)
        except (ValueError, RecursionError):
            continue
        return line if isinstance(line, dict) else None
    return None


def run_card(tables: Mapping[str, Any], folder: Path, steps: int) -> dict[str, Any]:
    """What reports say about a run as a whole: its title and main settings.

    `tables` are the resolved settings as in settings.toml; `steps` may be fewer than they say.
    """
    run, model, loss, trainer = (_section(tables, name) for name in ("run", "model", "loss", "trainer"))
    lora = model.get("lora")
    facts = {
        "model": model.get("name"),
        "weights": f"LoRA r {lora.get('r')}" if isinstance(lora, Mapping) else "full",
        "loss": loss.get("name"),
        "prompts/step": run.get("prompts_per_step"),
        "rollouts/prompt": run.get("rollouts_per_prompt"),
        "lr": trainer.get("lr"),
        "seed": run.get("seed"),
    }
    title = f"{folder.resolve().name}: {loss.get('name')} on {model.get('name')}"
    return {"title": title, "folder": str(folder), "steps": steps, "facts": facts}


def _section(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Empty if it is not a table: settings.toml may have been edited by hand."""
    found = tables.get(name)
    return found if isinstance(found, Mapping) else {}


def flattened(tables: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys: {"run": {"seed": 0}} becomes {"run.seed": 0}. Tables in a list are numbered."""
    if isinstance(tables, list) and tables and all(isinstance(each, dict) for each in tables):
        tables = {str(number): each for number, each in enumerate(tables)}
    if not isinstance(tables, dict):
        return {prefix.removesuffix("."): tables}
    return {key: value for name, each in tables.items() for key, value in flattened(each, f"{prefix}{name}.").items()}
