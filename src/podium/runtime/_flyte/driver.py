"""The driver's task: the very command that a user gave, with stages that send tasks.

It holds no weights. Lost, it is started again by Flyte and goes on from the last commit with its history.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from podium.run_folder import RunFolder
from podium.runtime._flyte import environments as where
from podium.runtime._flyte.sdk import Dir, flyte
from podium.runtime._flyte.store import Store
from podium.runtime._flyte.tasks import final_if_named
from podium.settings import Settings


@dataclass
class Driving:
    """What a runtime that is built inside the driver's task finds there."""

    base: Dir
    """The base model; empty where its name says enough."""
    store: Store
    trainer: Any = None
    """Once it is built."""


_current: ContextVar[Driving | None] = ContextVar("driving", default=None)


def driving() -> Driving | None:
    """None outside of a driver's task."""
    return _current.get()


@contextmanager
def _as_current(given: Driving) -> Iterator[Driving]:
    token = _current.set(given)
    try:
        yield given
    finally:
        _current.reset(token)


@where.driver_environment.task(report=True, retries=where.RETRIES, max_inline_io_bytes=where.MAX_INLINE_BYTES)
def drive(job: str, base: Dir) -> tuple[str, Dir]:
    """The summary of the run, and the trained model or adapter."""
    from podium.run import resume, train

    told = json.loads(job)
    settings = Settings.from_dict(told["settings"])
    path = Path(told["folder"] or settings.run.folder or "")
    with final_if_named(), _as_current(Driving(base, Store(flyte.ctx().checkpoint))) as now:
        is_restored = now.store.restore(RunFolder(path))
        if told["folder"] is None and not is_restored:
            summary = train(settings, console_mode=told["console_mode"])
        else:
            others = {"step": told["step"], "allow_change": told["allow_change"], "console_mode": told["console_mode"]}
            summary = resume(settings, RunFolder.open(path), **others)
        model = now.trainer.model if now.trainer is not None else None
        return json.dumps(asdict(summary)), model or Dir.empty()
