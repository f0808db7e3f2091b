"""Where the seconds of a step went."""

from statistics import fmean

from podium.report._series import Series

LAPS = ("report", "sync", "eval", "checkpoint", "rollout", "pack", "train")
"""Stages in the order in which they follow one another from one step's report to the next's. Together they are the wall
time of a step; every other `time/*` runs beside them."""


def laps(series: Series, count: int) -> dict[str, float]:
    """Mean seconds of each stage over the last `count` steps; nothing for stages that are not there."""
    found = {stage: series.last(f"time/{stage}_s", count) for stage in LAPS}
    return {stage: fmean(values) for stage, values in found.items() if values}
