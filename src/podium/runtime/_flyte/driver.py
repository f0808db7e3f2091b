"""The driver's task: the very command that a user gave, with stages that send tasks.

It holds no weights. Lost, it is started again by Flyte and goes on from the last commit with its history.
"""

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path

from podium.run_folder import RunFolder
from podium.runtime._flyte import environments as where
from podium.runtime._flyte.replica import stored
from podium.runtime._flyte.sdk import Dir, flyte
from podium.runtime._flyte.store import Store, history_files
from podium.runtime._flyte.tasks import fetch_model, final_if_named
from podium.settings import Settings


@dataclass(frozen=True)
class Driving:
    """What a runtime that is built inside the driver's task finds there."""

    run_id: str
    """Flyte's name of the run: the same in every attempt."""
    base: Dir
    """The base model; empty where its name says enough."""
    store: Store


_current: ContextVar[Driving | None] = ContextVar("driving", default=None)


def driving() -> Driving | None:
    """None outside of a driver's task."""
    return _current.get()


@contextmanager
def _as_current(given: Driving) -> Iterator[None]:
    token = _current.set(given)
    try:
        yield
    finally:
        _current.reset(token)


@where.driver_environment.task(report=True, **where.IN_PODIUM)
def drive(job: str, base: Dir) -> tuple[str, Dir, Dir]:
    """The summary of the run, the trained model or adapter, and the run's history: what pages are made of."""
    from podium.run import resume, train

    told = json.loads(job)
    settings = Settings.from_dict(told["settings"])
    folder = RunFolder(Path(told["folder"] or settings.run.folder or ""))
    with final_if_named():
        if told["fetch"] is not None:
            base = asyncio.run(fetch_model(name=told["fetch"]))
        kept = flyte.ctx().checkpoint_paths
        assert kept is not None and kept.checkpoint_path is not None, "every task has them"  # noqa: PT018
        store = Store(kept.checkpoint_path, kept.prev_checkpoint_path)
        with closing(store), _as_current(Driving(str(flyte.ctx().action.run_name), base, store)):
            is_restored = store.restore(folder)
            if told["folder"] is None and not is_restored:
                summary = train(settings, console_mode=told["console_mode"])
            else:
                others = {key: told[key] for key in ("step", "allow_change", "console_mode")}
                summary = resume(settings, RunFolder.open(folder.path), **others)
        model = [file for file in folder.final.rglob("*") if file.is_file()]
        return json.dumps(asdict(summary)), _kept(folder.final, model), _kept(folder.path, history_files(folder))


def _kept(folder: Path, files: list[Path]) -> Dir:
    """These files of a folder where they outlive the driver's container; in local mode they are where they were."""
    if not flyte.ctx().is_in_cluster():
        return Dir(path=str(folder.absolute()))

    def copy(place: Path) -> None:
        for file in files:
            target = place / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)

    return asyncio.run(stored(folder.name, copy))
