"""report.html in the run folder: one self-contained file that shows the current state of the run.

It needs no network, account or server: open it from disk. It reloads itself while the run is running. It is made from
the run folder alone, so it has the full history after a kill and a resume. `podium report` serves the same page live.

Style and script are part of the file. Its content policy forbids it to load anything and allows only the script with
the given hash. The data is one JSON object, so no text of a rollout ever becomes markup.
"""

import base64
import hashlib
import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from podium.records import EvalReport, StepReport
from podium.report.web.health import Facts, health
from podium.report.web.reader import RunReader
from podium.run.folder import RunFolder, write_atomically

EVERY_S = 2.0
"""Least time between two writes."""
MAX_SHARE = 0.005
"""Largest share of the run's time that goes into writing the page. A long run's page is written less often."""
WEB = Path(__file__).with_name("web")
SCRIPTS = ("base.js", "charts.js", "sections.js", "rollouts.js", "runs.js", "main.js")


class Page:
    def __init__(self, folder: RunFolder, every_s: float | None = None) -> None:
        self._folder, self._every_s = folder, EVERY_S if every_s is None else every_s
        self._reader: RunReader | None = None
        self._next = 0.0

    def start(self, card: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
        self._reader = RunReader(self._folder)
        self._write()

    def write(self, report: StepReport) -> None:
        if time.monotonic() >= self._next:
            self._write()

    def evaluated(self, report: EvalReport) -> None:
        """Nothing to do: the next write shows the evaluation."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._write()

    def fail(self) -> None:
        if self._reader is not None:
            self._write()

    def _write(self) -> None:
        assert self._reader is not None
        started = time.monotonic()
        self._reader.refresh()
        write_atomically(self._folder.page, render(page_data(self._reader)))
        ended = time.monotonic()
        self._next = ended + max(self._every_s, (ended - started) / MAX_SHARE if self._every_s else 0.0)


def page_data(reader: RunReader) -> dict[str, Any]:
    """All data of one run's page; call the reader's `refresh` first."""
    data = reader.data()
    verdicts = health(Facts(reader.series, reader.events, data["status"], reader.unreadable))
    names = {*reader.series.names, *(name for line in reader.evals for name in line if "/" in name)}
    return data | {"health": [verdict._asdict() for verdict in verdicts], "words": explanations(sorted(names))}


def explanations(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Name → (formula, what a bad value means), for the names that docs/metrics.md explains."""
    return {name: found for name in names if (found := _explanation(name)) is not None}


@lru_cache(maxsize=1000)
def _explanation(name: str) -> tuple[str, str] | None:
    """The entry of exactly this name, else of the longest name with placeholders that matches: `NAME` stands for a
    reward's name, `*` for any text."""
    patterns = {own: re.escape(own).replace("NAME", r"[^/]+").replace(r"\*", ".+") for own in glossary()}
    fitting = [own for own, pattern in patterns.items() if re.fullmatch(pattern, name)]
    return glossary()[name if name in glossary() else max(fitting, key=len)] if fitting else None


@lru_cache
def glossary() -> dict[str, tuple[str, str]]:
    """The tables of metrics.md: name → (formula, bad value). `make docs` copies the file to docs/."""
    entries: dict[str, tuple[str, str]] = {}
    for line in (WEB / "metrics.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            names, formula, bad = (cell.strip() for cell in line.strip("|").split(" | "))
            for name in re.findall("`(.+?)`", names):
                assert name not in entries, f"metrics.md explains {name} twice"
                entries[name] = formula, bad
    return entries


def render(data: Mapping[str, Any]) -> str:
    before, after = _template()
    return before + to_json(data) + after


def to_json(data: Mapping[str, Any]) -> str:
    """ASCII JSON without a `<`, so that no text can close the script element that holds it."""
    try:
        text = json.dumps(data, default=str, separators=(",", ":"), allow_nan=False)
    except ValueError:  # NaN or an infinity, which browsers cannot parse
        text = json.dumps(_finite(data), default=str, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    """Replaces NaN and infinities by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value


@lru_cache
def _template() -> tuple[str, str]:
    """The page before its data, and after it."""
    script = "\n" + "\n".join(map(_part, SCRIPTS)) + "\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = _part("page.html").replace("{{SCRIPT_HASH}}", f"sha256-{digest}").replace("{{STYLE}}", _part("style.css"))
    before, after = page.replace("\n{{SCRIPT}}\n", script).split("{{DATA}}")
    return before, after


def _part(name: str) -> str:
    return (WEB / "static" / name).read_text(encoding="utf-8").rstrip("\n")
