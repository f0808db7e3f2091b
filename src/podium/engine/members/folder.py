"""The private folder of a pool: the sockets of its workers and the weights that they load."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from podium.errors import WeightsError

PREFIX = "podium-pool-"
LONGEST_SOCKET = 100
"""Bytes of a unix socket's path; the kernel takes a few more."""


class PoolFolder:
    """Private to this user, locked by this process for as long as it lives; folders of dead ones are swept away."""

    def __init__(self) -> None:
        place = Path(tempfile.gettempdir())
        if len(os.fsencode(place)) > LONGEST_SOCKET - 60:
            place = Path("/tmp")
        sweep(place)
        new = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=place))  # 0700
        self._lock = (new / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = new.with_name(new.name.removeprefix("."))
        new.rename(self.path)
        self.weights, self.sockets = self.path / "weights", self.path / "sockets"
        self.weights.mkdir()
        self.sockets.mkdir()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def sweep(place: Path) -> None:
    """Removes what pools left whose driver and fork server were killed together."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError), (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def hold(published: Path, manifest: Path, held: Path) -> None:
    """The published folder once more as `held`, by links where that works: it stays when the first is removed."""
    held.mkdir()
    try:
        for path in published.iterdir():
            _link(path, held / path.name)
        _link(manifest, held.with_name(f"{held.name}.json"))
    except FileNotFoundError:
        shutil.rmtree(held)
        raise WeightsError(f"there are no weights called {published.name}") from None


def _link(path: Path, new: Path) -> None:
    try:
        os.link(path, new)
    except FileNotFoundError:
        raise
    except OSError:  # another file system
        shutil.copyfile(path, new)
