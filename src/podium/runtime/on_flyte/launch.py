"""The user's command: starts the driver's task, waits for it, and returns its summary.

In local mode the driver and all its tasks run in this process, and Flyte stores its files in the run folder. On the
cluster of the user's Flyte configuration, the run is there and the trained model is fetched at the end.
"""

import hashlib
import importlib.util
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import podium
from podium.errors import InputError
from podium.run.folder import RunFolder
from podium.settings.tables import CHOICES, Settings
from podium.terminal import warn


def check_installed() -> None:
    if importlib.util.find_spec("flyte") is None:
        raise InputError("runtime.name = 'flyte' needs flyte, which is not installed: pip install 'podium-rl[flyte]'")


def run_locally(job: dict[str, Any]) -> dict[str, Any]:
    from podium.run.start import StopSignal
    from podium.runtime.on_flyte.driver import drive
    from podium.runtime.on_flyte.sdk import Dir, errors, flyte
    from podium.runtime.on_flyte.stages import as_podium_error

    settings = Settings.from_dict(job["settings"])
    folder = RunFolder(Path(job["folder"] or settings.run.folder or ""))
    raw = folder.outside / "raw"
    shutil.rmtree(folder.outside / "metadata", ignore_errors=True)
    _stage_checkpoint(raw)
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


def _stage_checkpoint(raw: Path) -> None:
    """What Flyte does between two attempts: the checkpoint of the last attempt becomes the one to load."""
    if (raw / "checkpoint").exists():
        (raw / "checkpoint").replace(raw / "prev_checkpoint")


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
    from podium.runtime.on_flyte.driver import drive
    from podium.runtime.on_flyte.sdk import errors, flyte
    from podium.runtime.on_flyte.stages import as_podium_error

    settings = Settings.from_dict(job["settings"])
    if job["folder"] is not None:
        raise InputError(
            "a run on a cluster is taken up again by Flyte itself, whenever its driver is lost; `podium resume` is for "
            "runs of this machine"
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
        summary, model, history = run.outputs()
    except errors.BaseRuntimeError as error:
        raise as_podium_error(error, "drive") from error
    folder = RunFolder(Path(settings.run.folder or ""))
    told = json.loads(summary)
    history.download_sync(folder.path)
    if told["model"] is not None:
        model.download_sync(folder.final)
    return {**told, "folder": str(folder.path), "page": str(folder.page), "model": told["model"] and str(folder.final)}


def prepare_cluster(settings: Settings, **context: Any) -> tuple[Any, Any, str | None]:
    """Returns what starts tasks on the cluster; the base model, if it is a folder of this machine; and the model's
    name, if the driver has to fetch it. `context` is for Flyte's run."""
    from podium.runtime.on_flyte.environments import PACKAGE, configure, include
    from podium.runtime.on_flyte.sdk import Dir, flyte, quietly

    with quietly():
        flyte.init_from_config(root_dir=Path.cwd())
    configure(settings)
    files = _files(settings)
    include(files)
    code = [_text(file) for file in (*files, str(PACKAGE))]  # Podium is in the image, which may be ahead of its version
    digest = hashlib.blake2b("".join([settings.to_toml(), *code]).encode(), digest_size=6)
    version = f"podium-{podium.__version__}-{digest.hexdigest()}"
    runner = flyte.with_runcontext(mode="remote", copy_style="none", version=version, **context)
    name = settings.model.name
    if name in ("embedded", "smollm2-135m"):
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


def _text(name: str) -> str:
    files = [Path(name)] if Path(name).is_file() else sorted(Path(name).rglob("*.py"))
    return "".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
