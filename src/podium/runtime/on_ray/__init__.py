"""The Ray cluster of a run: a new one on this machine, which ends with the run, or one that runs already.

The files of a new cluster are in a private folder. A small shell process removes it if this process is killed. There is
no dashboard.
"""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import AuthenticationError
from ray.util import get_placement_group, placement_group, placement_group_table, remove_placement_group

from podium.errors import InputError, ProvisionError

LINGER_S = 300.0
CLEANER = """
read -r line
for _ in 1 2 3 4; do
    named=$(grep -lsF "PODIUM_RAY=$1" /proc/[0-9]*/environ)
    for found in $named $(find /proc/[0-9]*/fd -lname "$1/*" 2>/dev/null); do
        process=${found#/proc/}
        process=${process%%/*}
        [ "$process" = "$$" ] || kill -KILL "$process" 2>/dev/null
    done
    rm -rf "$1"
    sleep 0.3
done
"""
"""A shell whose input ends when this process does. It finds Ray's processes by the folder, which they have in their
environment or hold files open in, and kills them; some would notice only later that the driver is gone."""
CLOSE_S = 20.0
KNOCK_S = 10.0
LONGEST_PLACE = 24
"""Longest path of the folder, in bytes, with which the names of Ray's sockets are short enough for the kernel."""


@dataclass(frozen=True)
class DriverContext:
    """Where the driver runs, so that actors find the code and files that it finds."""

    cwd: str
    path: tuple[str, ...]
    scratch: str | None
    """Folder for temporary files, removed with the cluster; None: the system's folder."""
    linger_s: float | None
    """Seconds without a ping from a driver after which an actor ends; None: Ray ends it with the driver."""


class Cluster:
    """Connected until it is closed. A new cluster gets `num_cpus`, whatever the machine has: actors that share cores
    are slow, and not refused."""

    def __init__(self, address: str | None, run_id: str, num_cpus: float, linger_s: float | None) -> None:
        if ray.is_initialized():
            raise InputError("this process is connected to Ray already; call ray.shutdown() first")
        self.namespace, self.is_own = f"podium-{run_id}", address is None
        self._folder: Path | None = None
        self._cleaner: subprocess.Popen[bytes] | None = None
        self._reserved: list[Any] = []
        shared: dict[str, Any] = {"namespace": self.namespace, "logging_level": logging.ERROR, "log_to_driver": False}
        try:
            self._start(num_cpus, shared) if address is None else _connect(address, shared)
        except BaseException:
            self.close()
            raise
        scratch, lingers = (str(self._folder), None) if self.is_own else (None, linger_s or LINGER_S)
        self.driver = DriverContext(os.getcwd(), tuple(sys.path), scratch, lingers)

    def _start(self, num_cpus: float, shared: dict[str, Any]) -> None:
        place = tempfile.gettempdir()
        place = place if len(os.fsencode(place)) <= LONGEST_PLACE else "/tmp"
        self._folder = Path(tempfile.mkdtemp(prefix="podium-ray-", dir=place))  # 0700
        self._cleaner = subprocess.Popen(
            ["/bin/sh", "-c", CLEANER, "sh", str(self._folder)], stdin=subprocess.PIPE, start_new_session=True
        )
        os.environ["PODIUM_RAY"] = str(self._folder)
        cpus = max(len(os.sched_getaffinity(0)), int(num_cpus + 0.999))
        with _own_signals():
            ray.init(num_cpus=cpus, include_dashboard=False, _temp_dir=str(self._folder), **shared)

    @property
    def num_gpus(self) -> float:
        return ray.cluster_resources().get("GPU", 0.0)

    def reserve(self, kind: str, bundles: list[dict[str, float]], can_return: bool) -> Any:
        """Asks for a placement group; one that a former driver of this run left is used if it has the same bundles."""
        outlives = can_return and not self.is_own
        name = f"{self.namespace}-{kind}"
        if outlives:
            with suppress(ValueError):
                left = get_placement_group(name)
                if list(placement_group_table(left)["bundles"].values()) == bundles:
                    self._reserved.append(left)
                    return left
                remove_placement_group(left)
        group = placement_group(bundles, name=name, lifetime="detached" if outlives else None)
        self._reserved.append(group)
        return group

    def wait_for(self, group: Any, limit_s: float) -> None:
        if not group.wait(timeout_seconds=limit_s):
            asked = {name: size * len(group.bundle_specs) for name, size in group.bundle_specs[0].items()}
            raise ProvisionError(
                f"Ray found no room for them: they ask for {_shown(asked)}, the cluster has "
                f"{_shown(ray.cluster_resources())}, of which {_shown(ray.available_resources())} are free "
                f"(runtime.start_s = {limit_s:g})"
            )

    def close(self) -> None:
        """Removes the placement groups, the last one first, and disconnects; a cluster of the run's own ends."""
        if ray.is_initialized():
            for group in reversed(self._reserved):
                with suppress(Exception):  # the cluster itself may have failed
                    remove_placement_group(group)
            ray.shutdown()
        for _ in range(50):  # Ray's processes may still write to their logs
            if self._folder is None or not self._folder.exists():
                break
            shutil.rmtree(self._folder, ignore_errors=True)
            time.sleep(0.1)
        if self._cleaner is not None and self._cleaner.stdin is not None:
            self._cleaner.kill()
            self._cleaner.stdin.close()
            self._cleaner.wait(timeout=CLOSE_S)
        self._folder = self._cleaner = None


def _connect(address: str, shared: dict[str, Any]) -> None:
    try:
        if address != "auto":  # fails early where nothing listens: Ray would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()
        with _own_signals():
            ray.init(address=address, **shared)
    except AuthenticationError:
        raise InputError(
            f"runtime.address = {address!r}: the cluster does not take the token; set RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH as on its nodes"
        ) from None
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0][:300]
        raise InputError(
            f"runtime.address = {address!r}: no Ray cluster of this version answers there ({reason}); start one with "
            "`ray start --head`, or leave the address out"
        ) from None


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keeps Podium's signal handlers: with Ray's, SIGTERM would end this process at once instead of at a safe point."""
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)} if is_main else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _shown(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if name in resources) or "nothing"
