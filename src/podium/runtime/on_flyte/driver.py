"""The driver's task, and the user's command that starts it.

The driver's task is the command that the user gave, with stages that send tasks. In local mode the driver and all its
tasks run in the process of the command, and Flyte stores its files in the run folder. With a cluster, the run is on the
cluster of the user's Flyte configuration, and the command fetches the trained model at the end.

The driver holds no weights. After each commit it stores all that the run needs to continue (`Store`), so that Flyte can
start a lost driver again from the last commit.
"""

import asyncio
import hashlib
import json
import logging
import os
import shutil
import tarfile
import tempfile
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import podium
from podium.errors import CheckpointError, InputError
from podium.observer import StopSignal
from podium.run.checkpoint import list_checkpoints, step_of
from podium.run.folder import OUTSIDE, RunFolder
from podium.runtime import on_flyte as where
from podium.runtime.on_flyte import Dir, errors, flyte, quietly, storage
from podium.runtime.on_flyte.tasks import as_podium_error, fetch_model, final_if_named, stored
from podium.runtime.ranks.launch import run_job
from podium.settings.tables import CHOICES, Settings
from podium.untrusted import warn

LEFT_OUT = {"lock", "checkpoints", "final", "weights", "stacks.txt", OUTSIDE}
"""Entries of a run folder that are not stored as history; of the checkpoints the newest is stored."""


class Store:
    """`destination` is where this attempt of the driver's task saves, `source` where the last attempt saved.

    `flyte.Checkpoint.load` takes any error of the store for "there is none", and the run would start over in silence.
    Here only the store itself says "none"; every other error is a `CheckpointError`.
    """

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
        source, problem = self._checkpoint.remote_source, "it is not what was saved"
        try:
            if source is None or not storage.exists_sync(source):
                return None
            restored = self._checkpoint.load_sync()
            if restored is not None and restored.is_dir():
                return restored
        except Exception as error:  # whatever a store's client raises
            problem = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"the checkpoint {source} cannot be read: {problem}; the run is not started over: repair the store and try "
            "again"
        )


def history_files(folder: RunFolder) -> list[Path]:
    """The files that tell of the run, except files that are being written."""
    own = (path for path in folder.path.iterdir() if path.name not in LEFT_OUT)
    files = (file for path in own for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
    return sorted(file for file in files if ".tmp-" not in file.name)


@dataclass(frozen=True)
class Driving:
    """What the runtime finds inside the driver's task."""

    run_id: str
    """Flyte's name of the run: the same in every attempt."""
    base: Dir
    """The base model; empty where its name says enough."""
    store: Store


current: ContextVar[Driving | None] = ContextVar("driving", default=None)
"""None outside of a driver's task."""


@where.driver_environment.task(report=True, **where.IN_PODIUM)
def drive(job: str, base: Dir) -> tuple[str, Dir, Dir]:
    """The summary of the run, the trained model or adapter, and the run's history: what pages are made of."""
    given = json.loads(job)
    settings = Settings.from_dict(given["settings"])
    folder = RunFolder(Path(given["folder"] or settings.run.folder or ""))
    with final_if_named():
        if given["fetch"] is not None:
            base = asyncio.run(fetch_model(name=given["fetch"]))
        kept = flyte.ctx().checkpoint_paths
        assert kept is not None and kept.checkpoint_path is not None, "every task has them"  # noqa: PT018
        with closing(Store(kept.checkpoint_path, kept.prev_checkpoint_path)) as store:
            token = current.set(Driving(str(flyte.ctx().action.run_name), base, store))
            try:
                is_new = not store.restore(folder) and given["folder"] is None
                summary = run_job(given, settings, None if is_new else RunFolder.open(folder.path))
            finally:
                current.reset(token)
        model = [file for file in folder.final.rglob("*") if file.is_file()]
        return json.dumps(summary), _kept(folder.final, model), _kept(folder.path, history_files(folder))


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


def run_locally(job: dict[str, Any]) -> dict[str, Any]:
    """The user's command in local mode; returns the run's summary."""
    settings = Settings.from_dict(job["settings"])
    folder = RunFolder(Path(job["folder"] or settings.run.folder or ""))
    raw = folder.outside / "raw"
    shutil.rmtree(folder.outside / "metadata", ignore_errors=True)
    if (raw / "checkpoint").exists():  # as Flyte does between two attempts: this one loads what the last one saved
        (raw / "checkpoint").replace(raw / "prev_checkpoint")
    # The command reports what a task raises; Flyte would print each error with its traceback as well.
    flyte.init(log_level=None if "LOG_LEVEL" in os.environ else logging.CRITICAL)
    runner = flyte.with_runcontext(mode="local", raw_data_path=str(raw.absolute()), disable_run_cache=True)
    runner._metadata_path = str(folder.outside.absolute() / "metadata")  # else in /tmp, one folder for all users
    driver = drive.override(retries=flyte.RetryStrategy(count=0))  # here a person sees the error and resumes
    try:
        with StopSignal():
            summary, *_ = runner.run(driver, job=json.dumps({**job, "fetch": None}), base=Dir.empty()).outputs()
    except errors.BaseRuntimeError as error:
        raise as_podium_error(error, "drive") from error
    finally:
        _tidy(folder)
    return json.loads(summary)


def _tidy(folder: RunFolder) -> None:
    """Removes states and weights that tasks exchanged; a run that never began leaves nothing."""
    for path in (folder.outside / "raw").glob("*-*"):
        shutil.rmtree(path, ignore_errors=True)
    if not folder.settings.exists():
        shutil.rmtree(folder.outside, ignore_errors=True)
        if folder.path.is_dir() and not any(folder.path.iterdir()):
            folder.path.rmdir()


def run_on_cluster(job: dict[str, Any]) -> dict[str, Any]:
    """Sends the driver's task to the cluster and waits; stopping this command does not stop the run."""
    settings = Settings.from_dict(job["settings"])
    if job["folder"] is not None:
        raise InputError(
            "a run on a cluster is resumed by Flyte itself when its driver is lost; `podium resume` is for runs of "
            "this machine"
        )
    runner, base, fetch = prepare_cluster(settings)
    if not flyte.is_control_plane_available():
        raise InputError(
            "no Flyte cluster is configured: make a configuration by `flyte create config`, or set "
            "runtime.mode = 'local'"
        )
    try:
        run = runner.run(drive, job=json.dumps({**job, "fetch": fetch}), base=base)
        warn(f"the run is on the cluster: {run.url}\nit goes on there if you stop this command")
        run.wait()
        text, model, history = run.outputs()
    except errors.BaseRuntimeError as error:
        raise as_podium_error(error, "drive") from error
    folder = RunFolder(Path(settings.run.folder or ""))
    summary = json.loads(text)
    history.download_sync(folder.path)
    here = {"folder": str(folder.path), "page": str(folder.page)}
    if summary["model"] is not None:
        model.download_sync(folder.final)
        here["model"] = str(folder.final)
    return {**summary, **here}


def prepare_cluster(settings: Settings, **context: Any) -> tuple[Any, Any, str | None]:
    """Returns what starts tasks on the cluster; the base model, if it is a folder of this machine; and the model's
    name, if the driver has to fetch it. `context` is for Flyte's run."""
    with quietly():
        flyte.init_from_config(root_dir=Path.cwd())
    where.configure(settings)
    files = _files(settings)
    where.driver_environment.include = tuple(str(Path(file).absolute()) for file in files)  # it passes them on to tasks
    # Podium is in the image, which may be ahead of its version.
    code = [_digest(file) for file in (*files, str(where.PACKAGE))]
    digest = hashlib.blake2b("".join([settings.to_toml(), *code]).encode(), digest_size=6)
    version = f"podium-{podium.__version__}-{digest.hexdigest()}"
    runner = flyte.with_runcontext(mode="remote", copy_style="none", version=version, **context)
    name = settings.model.name
    if name in ("embedded", "embedded-tools", "smollm2-135m"):
        return runner, Dir.empty(), None
    folder = Path(name).expanduser()
    return (runner, Dir.from_local_sync(folder), None) if folder.is_dir() else (runner, Dir.empty(), name)


def _files(settings: Settings) -> list[str]:
    """Files of this machine that the settings name: data and user code. They travel under the same names."""
    if settings.checkpoint.start_from is not None:
        raise InputError("checkpoint.start_from names a folder of this machine, which the cluster does not have")
    named = [str(table.options["path"]) for table in (*settings.data, *settings.eval.data) if table.options.get("path")]
    chosen = [*(getattr(settings, section) for section in CHOICES), *settings.reward, *settings.report]
    code = [*(choice.name for choice in chosen), settings.filter.accept]
    named += [_source(name.rpartition(":")[0]) for name in code if ":" in name]
    files = [name for name in named if Path(name).exists()]
    for name in files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise InputError(
                f"{name}: files that go to the cluster must lie in the working folder and be named from it"
            )
    return sorted(set(files))


def _source(place: str) -> str:
    """The file or package folder of user code, relative to the working folder."""
    if place.endswith(".py"):
        return place
    package = Path(place.partition(".")[0])
    return str(package if package.is_dir() else package.with_suffix(".py"))


def _digest(name: str) -> str:
    """Of a file, or of the code in a folder."""
    files = [Path(name)] if Path(name).is_file() else sorted(Path(name).rglob("*.py"))
    return "".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
