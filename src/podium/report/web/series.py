"""The metrics of a run by step, one column per metric, sampled down to fewer points if the run is long.

A point of a long run stands for several steps: it has their mean, minimum and maximum, so that no spike is lost.
"""

import math
from array import array
from collections.abc import Mapping
from statistics import fmean
from typing import Any


class Series:
    def __init__(self) -> None:
        self.steps = array("q")
        self._columns: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, line: Mapping[str, Any]) -> None:
        """Adds a line of metrics.jsonl. A value that is not a finite number counts as missing."""
        for name, value in line.items():
            if "/" in name and is_number(value):
                column = self._columns.setdefault(name, array("d"))
                column.extend([math.nan] * (len(self.steps) - len(column)))
                column.append(value)
        self.steps.append(line["step"])

    @property
    def names(self) -> list[str]:
        return list(self._columns)

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
        columns: dict[str, dict[str, list[float | None]]] = {}
        for name in self._columns:
            values = self.column(name)
            if stride == 1:
                columns[name] = {"mean": [None if value is None else short(value) for value in values]}
                continue
            buckets = [[v for v in values[place : place + stride] if v is not None] for place in places]
            columns[name] = {
                "mean": [short(math.fsum(bucket) / len(bucket)) if bucket else None for bucket in buckets],
                "low": [short(min(bucket)) if bucket else None for bucket in buckets],
                "high": [short(max(bucket)) if bucket else None for bucket in buckets],
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


LAPS = ("report", "sync", "eval", "checkpoint", "rollout", "pack", "train")
"""Stages in the order in which they follow each other from one step's report to the next. Together they are the wall
time of a step; every other `time/*` metric overlaps them."""


def laps(series: Series, count: int) -> dict[str, float]:
    """Mean seconds of each stage over the last `count` steps; stages without a metric are left out."""
    found = {stage: series.last(f"time/{stage}_s", count) for stage in LAPS}
    return {stage: fmean(values) for stage, values in found.items() if values}
