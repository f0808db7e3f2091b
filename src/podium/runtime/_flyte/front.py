"""What stays with the user: the command starts the driver's task, waits, and has its summary.

Locally the driver and all its tasks run in this process, and what Flyte stores lies in the run folder. On a cluster, by
the user's Flyte configuration, the run lives there; the trained model is fetched at the end.
"""

import importlib.util
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from podium.errors import InputError, PodiumError
from podium.run_folder import RunFolder
from podium.runtime._signals import StopSignal
from podium.settings import Settings


def check_installed() -> None:
    if importlib.util.find_spec("flyte") is None:
        raise InputError("runtime.name = 'flyte' needs flyte, which is not installed: pip install 'podium-rl[flyte]'")


def run_locally(job: dict[str, Any]) -> dict[str, Any]:
    from podium.runtime._flyte.driver import drive
    from podium.runtime._flyte.sdk import Dir, errors, flyte
    from podium.runtime._flyte.stages import as_podium_error

    settings = Settings.from_dict(job["settings"])
    folder = RunFolder(Path(job["folder"] or settings.run.folder or ""))
    raw = folder.outside / "raw"
    shutil.rmtree(folder.outside / "metadata", ignore_errors=True)
    _stage_checkpoint(raw)
    # What a task raises is told once, by the command; Flyte would print each with its traceback.
    flyte.init(log_level=None if "LOG_LEVEL" in os.environ else logging.CRITICAL)
    runner = flyte.with_runcontext(mode="local", raw_data_path=str(raw.absolute()), disable_run_cache=True)
    runner._metadata_path = str(folder.outside.absolute() / "metadata")  # else in /tmp, one folder for all users
    driver = drive.override(retries=flyte.RetryStrategy(count=0))  # here a person looks at what went wrong
    try:
        with StopSignal(settings.run.grace_s):
            summary, _ = runner.run(driver, job=json.dumps(job), base=Dir.empty()).outputs()
    except errors.BaseRuntimeError as error:
        raise as_podium_error(error, "drive") from error
    finally:
        _tidy(folder)
    return json.loads(summary)


def _stage_checkpoint(raw: Path) -> None:
    """What Flyte does between two attempts: the last one's checkpoint becomes the one to load."""
    if (raw / "checkpoint").exists():
        (raw / "checkpoint").replace(raw / "prev_checkpoint")


def _tidy(folder: RunFolder) -> None:
    """States and weights on their way are of no use once the run has ended; a run that never began leaves nothing."""
    for path in (folder.outside / "raw").glob("*-*"):
        shutil.rmtree(path, ignore_errors=True)
    if not folder.settings.exists():
        shutil.rmtree(folder.outside, ignore_errors=True)
        if folder.path.is_dir() and not any(folder.path.iterdir()):
            folder.path.rmdir()


def run_on_cluster(job: dict[str, Any]) -> dict[str, Any]:
    raise PodiumError("not yet")
