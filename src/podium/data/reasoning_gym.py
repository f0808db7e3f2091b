"""Procedural tasks of the package `reasoning-gym`, each scored by its own rule.

In: a task's name, a number of rows, a seed and the task's own options. Out: rows that name the reward `reasoning_gym`
and carry what its scorer needs. The prompt is the task's question followed by an instruction that says where to write
the answer.
"""

import io
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import fields
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import islice
from typing import Annotated, Any

from pydantic import Field

from podium.errors import InputError
from podium.records import Row

INSTRUCTION = "Think it through, then write your final answer, and nothing else, between <answer> and </answer>."

NOT_OFFERED = {
    "composite": "give one [[data]] table for each of its tasks, with a weight",
    "game_of_life_halting": "its scorer accepts any text as correct",
}
"""Task → why it is not offered, or what to do instead."""

UNSOLVED = "Integral("
"""Occurs in an official answer that sympy could not compute. No answer can match it, so the next row is used."""
MAX_TRIES = 100


def reasoning_gym(
    *,
    task: Annotated[str, Field(description="such as chain_sum or countdown")],
    size: Annotated[int, Field(ge=1, description="number of rows")] = 500,
    seed: Annotated[int, Field(ge=0, lt=1 << 32, description="other seeds give other rows")] = 0,
    config: Annotated[dict[str, Any], Field(description="the task's own options, such as { max_terms = 3 }")] = {},  # noqa: B006
    instruction: Annotated[str, Field(description="text added below each question; empty: none")] = INSTRUCTION,
) -> list[Row]:
    """The same rows for the same options, on every machine with the same release of the package."""
    if find_spec("reasoning_gym") is None:
        raise InputError("data.name = 'reasoning_gym' needs the package reasoning-gym: pip install reasoning-gym")
    from reasoning_gym.factory import DATASETS, create_dataset

    if task not in DATASETS or task in NOT_OFFERED:
        raise InputError(f"data.task = {task!r} {_remedy(task, sorted(DATASETS))}")
    known = sorted({field.name for field in fields(DATASETS[task][1])} - {"seed", "size"})
    for key in config:
        if key not in known:
            raise InputError(f"data.config.{key} is not an option of {task}; valid: {', '.join(known) or 'none'}")
    options = {"seed": seed, "size": size, **config}
    try:
        with _quiet_and_seeded(seed):
            made = create_dataset(task, **options)
            entries = map(made.__getitem__, range(size * MAX_TRIES))
            solved = (entry for entry in entries if UNSOLVED not in str(entry["answer"]))
            return [_row(task, options, entry, instruction) for entry in islice(solved, size)]
    except Exception as error:  # the package checks its options with asserts; anything may come out of it
        reason = str(error).strip() or type(error).__name__
        raise InputError(f"data.task = {task!r} with {options} cannot make its rows: {reason}") from None


def _row(task: str, options: dict[str, Any], entry: dict[str, Any], instruction: str) -> Row:
    question = f"{entry['question']}\n\n{instruction}" if instruction else entry["question"]
    return Row.from_text(
        question,
        answer=entry["answer"],
        reward=("reasoning_gym",),
        metadata={"task": task, "options": options, "entry": entry},
    )


@contextmanager
def _quiet_and_seeded(seed: int) -> Iterator[None]:
    """Hides a task's prints and warnings, and restores the global random state that some tasks use."""
    before = random.getstate()
    random.seed(seed)
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(before)


def _remedy(task: str, tasks: list[str]) -> str:
    if task in NOT_OFFERED:
        return f"is not offered: {NOT_OFFERED[task]}"
    offered = [name for name in tasks if name not in NOT_OFFERED]
    close = get_close_matches(task, offered, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"is not a task of reasoning-gym; {hint}Tasks: {', '.join(offered)}"
