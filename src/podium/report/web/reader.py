"""From a run folder to what a page shows, during the run or long after it.

Each refresh reads only what is new. A resume truncates files; the reader then starts again from their beginning. So
that the page stays small however long the run is, it carries a selection: curves with a limited number of points, and
a few rollouts of some steps. `podium report` shows any step in full.
"""

import json
import math
import time
import tomllib
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import NoneType
from typing import Any

from podium.run.folder import RunFolder, parsed, read_lines, read_pieces
from podium.untrusted import open_regular, read_regular

LAPS = ("report", "sync", "eval", "checkpoint", "rollout", "pack", "train")
"""Stages in the order in which they follow each other from one step's report to the next. Together they are the wall
time of a step; every other `time/*` metric overlaps them."""
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
MAX_STEP = 1 << 62
MAX_GRID_STEPS = 32
"""A long run shows the rollouts of every 2^n-th step, at most this many, and of its last steps."""
LAST_STEPS = 3
ROLLOUTS_PER_STEP = 12
MAX_STEP_BYTES = 100_000
LIMITS = {
    **dict.fromkeys(("prompt", "answer"), 6_000),
    "text": 12_000,
    **dict.fromkeys(("token_ids", "logprobs", "logprob_gaps"), 1_200),
}
"""Characters or tokens of a rollout that a page carries; the live page can fetch the rest."""
NUMBER = (int, float)
STATUS = {"state": str, "message": str, "step": int, "steps": int, "percent": NUMBER, "pid": int}
EVENT = {"event": str, "error": str, "message": str, "time": NUMBER}
"""Types of the fields that the page relies on; every field is optional."""
ROLLOUT: dict[str, tuple[type, ...]] = {
    "ordinal": (int,),
    "sample_index": (int,),
    "policy_version": (int, list),
    "trained": (bool,),
    "prompt": (str,),
    "text": (str,),
    "reward": (*NUMBER, NoneType),
    "reward_parts": (dict,),
    "correct": (bool, NoneType),
    "advantage": (*NUMBER, NoneType),
    "finish_reason": (str,),
    "token_ids": (list,),
    "logprobs": (list,),
}
"""Fields that a rollout's line must have, and their types; `answer` may have any type."""


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
        lines = [line for raw in raws if (line := parsed(raw)) is not None]
        self.passed_over = len(raws) - len(lines)
        return lines, is_new


class RunReader:
    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._metrics, self._events_file = GrowingFile(folder.metrics), GrowingFile(folder.events)
        self.series, self.evals = Series(), list[dict[str, Any]]()
        self.events: list[dict[str, Any]] = []
        """What happened, without the events of every step."""
        self.unreadable: Counter[str] = Counter()
        """Lines that the page leaves out, by file."""
        self._moments: deque[dict[str, Any]] = deque(maxlen=MAX_MOMENTS)
        self._rollouts: dict[int, list[dict[str, Any]]] = {}
        self._pieces: dict[int, str] = {}
        self._pieces_size = 0

    def refresh(self) -> None:
        """Reads what the run has written since the last call."""
        lines, is_new = self._metrics.new_lines()
        if is_new:
            self.series, self.evals, self._rollouts = Series(), [], {}
            self.unreadable.clear()
        self.unreadable[self.folder.metrics.name] += self._metrics.passed_over
        for line in lines:
            if type(line.get("step")) is not int or not 0 <= line["step"] < MAX_STEP:
                self.unreadable[self.folder.metrics.name] += 1
            elif line.get("eval"):
                self.evals.append(line)
            else:
                self.series.add(line)
        events, is_new = self._events_file.new_lines()
        if is_new:
            self.events.clear()
            self._moments.clear()
        self.unreadable[self.folder.events.name] += self._events_file.passed_over
        for event in events:
            if not _fits(event, EVENT) or "event" not in event:
                self.unreadable[self.folder.events.name] += 1
            elif (kind := event["event"]) not in LEFT_OUT:
                (self._moments if kind in ROUTINE else self.events).append(event)

    def data(self) -> dict[str, Any]:
        """What the run's files say; call `refresh` first."""
        status = self.status()
        last = self.series.steps[-1] if len(self.series) else 0
        rollouts = self._shown_rollouts(last)
        series = self.series.sampled(MAX_POINTS)
        evals = self.evals[:: -(-len(self.evals) // MAX_EVALS) or 1]
        return {
            "written": time.time(),
            "status": status,
            "card": self.card(status),
            "laps": LAPS,
            "series": series,
            "recent": self.series.lines(RECENT_STEPS) if series["stride"] > 1 else [],
            "evals": evals if not evals or evals[-1] is self.evals[-1] else [*evals, self.evals[-1]],
            "rollouts": rollouts,
            "rollout_steps": last,
            "pieces": self._pieces_of(rollouts),
            "events": self.events[-MAX_EVENTS:],
            # The timeline counts what an event lists and does not name it.
            "moments": [
                {key: len(value) if isinstance(value, list) else value for key, value in event.items()}
                for event in self._moments
            ],
        }

    def status(self) -> dict[str, Any]:
        """status.json. The state is "killed" if the file says "running" but no process holds the run's lock."""
        status = {key: value for key, value in self.folder.status.items() if _fits({key: value}, STATUS)}
        if status.get("state") == "running" and not self.folder.is_locked():
            return {**status, "state": "killed"}
        return status or {"state": "running", "step": 0}

    def card(self, status: dict[str, Any]) -> dict[str, Any]:
        tables = self.settings()
        steps = status.get("steps") or _section(tables, "run").get("steps")
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
        lines = read_lines(path)
        whole = [line for line in lines if line is not None and is_whole(line)]
        self.unreadable[f"rollouts/{path.name}"] = len(lines) - len(whole)
        return whole

    def _pieces_of(self, rollouts: Iterable[dict[str, Any]]) -> dict[int, str]:
        path = self.folder.tokens
        if path.is_file() and path.stat().st_size != self._pieces_size:
            self._pieces, self._pieces_size = read_pieces(path), path.stat().st_size
        used = {token_id for rollout in rollouts for token_id in rollout["token_ids"]}
        return {token_id: self._pieces[token_id] for token_id in sorted(used) if token_id in self._pieces}


def _fits(line: dict[str, Any], kinds: dict[str, Any]) -> bool:
    """Whether every known field has its type; a number must be finite too."""
    return all(
        isinstance(value, kinds[key]) and (isinstance(value, str) or is_number(value))
        for key, value in line.items()
        if key in kinds
    )


def run_card(tables: Mapping[str, Any], folder: Path, steps: int) -> dict[str, Any]:
    """What reports say about a run as a whole: its title and main settings.

    `tables` are the resolved settings as in settings.toml; `steps` may be fewer than they say.
    """
    run, model, loss, trainer = (_section(tables, name) for name in ("run", "model", "loss", "trainer"))
    lora, name = model.get("lora"), folder.resolve().name
    facts = {
        "model": model.get("name"),
        "weights": f"LoRA r {lora.get('r')}" if isinstance(lora, Mapping) else "full",
        "loss": loss.get("name"),
        "prompts/step": run.get("prompts_per_step"),
        "rollouts/prompt": run.get("rollouts_per_prompt"),
        "lr": trainer.get("lr"),
        "seed": run.get("seed"),
    }
    about = f": {facts['loss']} on {facts['model']}" if facts["loss"] and facts["model"] else ""
    return {"title": f"{name}{about}", "folder": str(folder), "steps": steps, "facts": facts}


def _section(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Empty if it is not a table: settings.toml may have been edited by hand."""
    found = tables.get(name)
    return found if isinstance(found, Mapping) else {}


class Series:
    """The metrics of a run by step, one column per metric. A point of a long run has the mean, the minimum and the
    maximum of its steps, so that no spike is lost."""

    def __init__(self) -> None:
        self.steps = array("q")
        self._columns: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    def add(self, line: Mapping[str, Any]) -> None:
        """Adds a line of metrics.jsonl. A value that is not a finite number counts as missing."""
        for name, value in line.items():
            if "/" in name and is_number(value):
                column = self._columns.setdefault(name, array("d"))
                column.extend([math.nan] * (len(self.steps) - len(column)))
                column.append(value)
        self.steps.append(line["step"])

    def column(self, name: str) -> list[float | None]:
        """One value per step; None for steps without the metric."""
        values = self._columns.get(name, array("d"))
        known = [None if math.isnan(value) else value for value in values]
        return known + [None] * (len(self.steps) - len(known))

    def last(self, name: str, count: int = 1) -> list[float]:
        """The known values of the last `count` steps, oldest first."""
        return [value for value in self.column(name)[-count:] if value is not None]

    def lines(self, count: int) -> list[dict[str, Any]]:
        """The last `count` steps, each with all its metrics."""
        first = max(0, len(self.steps) - count)
        made: list[dict[str, Any]] = [{"step": step} for step in self.steps[first:]]
        for name in self._columns:
            for line, value in zip(made, self.column(name)[first:], strict=True):
                if value is not None:
                    line[name] = short(value)
        return made

    def sampled(self, max_points: int) -> dict[str, Any]:
        """`steps`, `stride` (steps per point) and `columns`: name → `mean`, and `low` and `high` if stride > 1."""
        stride = -(-len(self.steps) // max_points) or 1
        places = range(0, len(self.steps), stride)
        kinds = {"mean": fmean} if stride == 1 else {"mean": fmean, "low": min, "high": max}
        columns: dict[str, dict[str, list[float | None]]] = {}
        for name in self._columns:
            values = self.column(name)
            buckets = [[v for v in values[place : place + stride] if v is not None] for place in places]
            columns[name] = {
                kind: [short(of(bucket)) if bucket else None for bucket in buckets] for kind, of in kinds.items()
            }
        ends = [self.steps[min(place + stride, len(self.steps)) - 1] for place in places]
        return {"steps": ends, "stride": stride, "columns": columns}


def is_number(value: Any) -> bool:
    """Whether a chart can draw the value; it cannot draw an integer of 400 digits."""
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:
        return False


def short(value: float) -> float:
    """Five digits: more than a curve can show."""
    return float(f"{value:.5g}")


def shown_steps(last: int) -> list[int]:
    """A selection of steps 1 … last. A step that a longer run shows was already shown when the run was shorter."""
    stride = 1
    while last > MAX_GRID_STEPS * stride:
        stride *= 2
    return sorted({*range(1, last + 1, stride), *range(max(1, last - LAST_STEPS + 1), last + 1)})


def is_whole(line: Mapping[str, Any]) -> bool:
    """Whether a page can show the line: another program may have written it, or a disk may have damaged it."""
    return (
        "answer" in line
        and all(key in line and isinstance(line[key], kinds) for key, kinds in ROLLOUT.items())
        and all(type(token_id) is int for token_id in line["token_ids"])
        and all(isinstance(value, NUMBER) for value in line["logprobs"])
        and isinstance(line.get("logprob_gaps"), (list, NoneType))
        and all(_is_turn(turn) for turn in line.get("turns", ()))
        and all(isinstance(span, list) and list(map(type, span)) == [int] * 5 for span in line.get("spans", ()))
    )


def _is_turn(turn: Any) -> bool:
    """Role, text, seconds."""
    return isinstance(turn, list) and len(turn) == 3 and type(turn[2]) in NUMBER and {*map(type, turn[:2])} == {str}


def chosen(lines: Sequence[Mapping[str, Any]], step: int) -> list[dict[str, Any]]:
    """A few of one step's ledger lines, without duplicates: the best, the worst and some in between."""
    different = list({(line["prompt"], line["text"], line["reward"]): line for line in lines}.values())
    # Rollouts without a reward rank last, so that the page shows some of them too.
    ranked = sorted(different, key=lambda line: math.inf if line["reward"] is None else -line["reward"])
    third = ROLLOUTS_PER_STEP // 3
    if len(ranked) > ROLLOUTS_PER_STEP:
        between = ranked[third:-third]
        spread = [between[number * len(between) // third] for number in range(third)]
        ranked = [*ranked[:third], *spread, *ranked[-third:]]
    made: list[dict[str, Any]] = []
    room = MAX_STEP_BYTES
    for line in ranked:
        small = for_page(line, step, is_cut=True)
        room -= len(json.dumps(small))
        if made and room < 0:
            break
        made.append(small)
    return made


def for_page(line: Mapping[str, Any], step: int, *, is_cut: bool) -> dict[str, Any]:
    """A ledger line as the page's script reads it; `is_cut` truncates its texts and its tokens."""
    made: dict[str, Any] = {key: line.get(key) for key in (*ROLLOUT, "source", "answer", "logprob_gaps")} | {
        "step": step,
        "answer": str(line["answer"]),
        "logprobs": [round(value, 4) for value in line["logprobs"]],
        "num_tokens": len(line["token_ids"]),
        "num_chars": len(line["text"]),
    }
    if turns := line.get("turns"):
        of_turn = LIMITS["text"] // len(turns) if is_cut else None
        made |= {
            "turns": [[role, text[:of_turn], seconds] for role, text, seconds in turns],
            "spans": line.get("spans", []),
            "failure": str(line.get("failure", "")),
        }
    return made | {key: made[key][:limit] for key, limit in LIMITS.items() if is_cut and made[key] is not None}
