"""The driver's checkpoint on Flyte: after each commit, all that the run needs to go on is kept where its next attempt
finds it.

`flyte.Checkpoint.load` takes any error of the store for "there is none", and the run would start over in silence. Here
"none" is only what the store itself says is not there; everything else is a `CheckpointError`.
"""

import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from podium.checkpoint_files import list_checkpoints, step_of
from podium.errors import CheckpointError
from podium.run_folder import OUTSIDE, RunFolder
from podium.runtime._flyte.sdk import flyte, storage

LEFT_OUT = {"lock", "checkpoints", "final", "weights", "stacks.txt", OUTSIDE}
"""What of a run folder is not history; of its checkpoints the newest is kept."""


def history_files(folder: RunFolder) -> list[Path]:
    """What tells of the run; files that are just being written aside."""
    own = (path for path in folder.path.iterdir() if path.name not in LEFT_OUT)
    files = (file for path in own for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
    return sorted(file for file in files if ".tmp-" not in file.name)


class Store:
    """`destination` and `source` are the driver's task's: where this attempt saves, and where the last one did."""

    def __init__(self, destination: str, source: str | None) -> None:
        self._checkpoint: Any = flyte.Checkpoint(destination, source)

    def close(self) -> None:
        """Its scratch folder goes with the last reference to it."""
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
        """Brings the run folder to what the store has, where that is further; whether the store has anything."""
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
