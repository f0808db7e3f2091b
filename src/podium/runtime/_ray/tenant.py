"""What every actor of a run has in common: it finds the driver's code, answers the heartbeat, and does not outstay."""

import asyncio
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

LOOK_S = 1.0


@dataclass(frozen=True)
class Place:
    """Where a driver lives, for actors that should find what it finds."""

    cwd: str
    path: tuple[str, ...]
    scratch: str | None
    """Folder for temporary files, which ends with the cluster; None: the system's."""
    linger_s: float | None
    """An actor that has not heard of a driver for so long ends; None: it ends with the driver anyway."""


class Tenant:
    def __init__(self, place: Place) -> None:
        if os.path.isdir(place.cwd):
            os.chdir(place.cwd)
        sys.path += [entry for entry in place.path if entry not in sys.path and os.path.exists(entry)]
        if place.scratch is not None:
            os.environ["TMPDIR"] = place.scratch
            tempfile.tempdir = None  # looked up again
        self._heard, self._num_loading = time.monotonic(), 0
        if place.linger_s is not None:
            threading.Thread(target=self._leave_when_alone, args=(place.linger_s,), daemon=True).start()

    async def ping(self) -> None:
        self._heard = time.monotonic()

    async def stay(self) -> None:
        """Never returns: whoever waits for it learns of the actor's death."""
        await asyncio.get_running_loop().create_future()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """However long it takes, it is not left alone meanwhile."""
        self._num_loading += 1
        try:
            yield
        finally:
            self._num_loading -= 1
            self._heard = time.monotonic()

    def about(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "node": os.uname().nodename}

    def _leave_when_alone(self, limit_s: float) -> None:
        while self._num_loading or time.monotonic() - self._heard < limit_s:
            time.sleep(LOOK_S)
        with suppress(Exception):  # the cluster may be what went
            from ray.util import get_current_placement_group, remove_placement_group

            if (group := get_current_placement_group()) is not None:  # one beyond the reserved places has none
                remove_placement_group(group)
        os._exit(0)
