"""The driver's task: the command that a user gave, with stages that send tasks.

The driver holds no weights. After each commit it stores all that the run needs to go on (`Store`), so that Flyte can
start a lost driver again from the last commit.

`flyte.Checkpoint.load` takes any error of the store for "there is none", and the run would start over in silence. Here
"none" is only what the store itself says is not there; every other error is a `CheckpointError`.
"""

import asyncio
import json
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from podium.errors import CheckpointError
from podium.run.checkpoint import list_checkpoints, step_of
from podium.run.folder import OUTSIDE, RunFolder
from podium.runtime.on_flyte import environments as where
from podium.runtime.on_flyte.replica import stored
from podium.runtime.on_flyte.sdk import Dir, flyte, storage
from podium.runtime.on_flyte.tasks import fetch_model, final_if_named
from podium.settings.tables import Settings

LEFT_OUT = {"lock", "checkpoints", "final", "weights", "stacks.txt", OUTSIDE}
"""Entries of a run folder that are not stored as history; of the checkpoints the newest is stored."""


def history_files(folder: RunFolder) -> list[Path]:
    """The files that tell of the run, except files that are being written."""
    own = (path for path in folder.path.iterdir() if path.name not in LEFT_OUT)
    files = (file for path in own for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
    return sorted(file for file in files if ".tmp-" not in file.name)


class Store:
    """`destination` is where this attempt of the driver's task saves, `source` where the last attempt saved."""

    def __init__(self, destination: str, source: str | None) -> None:
        self._checkpoint: Any = flyte.Checkpoint(destination, source)

    def close(self) -> None:
        """Drops the last reference to Flyte's checkpoint, which removes its scratch folder."""
        self._checkpoint = None

    def save(self, folder: RunFolder, newest: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="podium-") as scratch:
            archive = Path(scratch) / "run.tar"
            with tarfile.open(archive, "w") as tar:
                for path in (*history_files(folder), *newest.iterdir()):
                    tar.add(path, str(path.relative_to(folder.path)))
            try:
                self._checkpoint.save_sync(archive)
            except Exception as error:  # whatever a store's client raises
                raise CheckpointError(
                    f"the checkpoint store {self._checkpoint.remote_destination} cannot be written: "
                    f"{type(error).__name__}: {error}; the run folder has the commit"
                ) from error

    def restore(self, folder: RunFolder) -> bool:
        """Copies the stored run into the run folder if it is further; returns whether the store has anything."""
        restored = self._load()
        if restored is None:
            return False
        kept = list_checkpoints(restored / "checkpoints")
        if not kept or not (restored / "settings.toml").is_file():
            raise CheckpointError(f"{self._checkpoint.remote_source} holds no run; the run is not started over")
        here = list_checkpoints(folder.checkpoints)
        if not here or step_of(here[-1]) < step_of(kept[-1]):
            shutil.copytree(restored, folder.path, dirs_exist_ok=True)
        return True

    def _load(self) -> Path | None:
        """The content of the last attempt's checkpoint, or None if it never had one."""
        source = self._checkpoint.remote_source
        if source is None:
            return None
        try:
            if not storage.exists_sync(source):
                return None
            restored = self._checkpoint.load_sync()
        except Exception as error:  # whatever a store's client raises
            raise _broken(source, f"{type(error).__name__}: {error}") from error
        if restored is None or not restored.is_dir():
            raise _broken(source, "it is not what was saved")
        return restored


def _broken(source: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {source} cannot be read: {why}; the run is not started over: mend the store and try again"
    )


@dataclass(frozen=True)
class Driving:
    """What the runtime finds inside the driver's task."""

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
    from podium.run.start import resume, train

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
    """These files of a folder, stored where they outlive the driver's container; in local mode the folder itself."""
    if not flyte.ctx().is_in_cluster():
        return Dir(path=str(folder.absolute()))

    def copy(place: Path) -> None:
        for file in files:
            target = place / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)

    return asyncio.run(stored(folder.name, copy))
